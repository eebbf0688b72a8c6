"""Divergences between the student's and the teacher's next-token distributions.

All take logits of both sides, in the order (student, teacher). The vocabularies of the two may differ by padding: up to
1024 rows, and up to half of the larger one, are cut off the end and the rest is renormalised.

Memory: contiguous logits are never copied as a whole. Beside the gradient, one tensor like the student's logits, about
ten float32 copies of one block of positions exist at a time; a block is ``chunk_size`` positions, or 4 million logits.
"""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from silverspoon_kd.losses.inputs import require, require_count, require_positive
from silverspoon_kd.losses.logit_sum import DivergenceLoss
from silverspoon_kd.losses.registry import register_loss


def relative_entropy(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``sum_v p_v (log p_v - log q_v)`` over the last dimension; never negative.

    Summed as ``p (log p - log q) - p + q``, which is the same for distributions, but no term of it is negative: neither
    rounding of a term nor of a normaliser can hide a small divergence. Near zero expm1 avoids cancellation.
    """
    p, gap = log_p.exp(), log_p - log_q
    near = p * (torch.expm1(-gap) + gap)
    far = p * (gap - 1) + log_q.exp()
    return near.where(gap.abs() < 1, far).sum(-1).clamp(min=0)


def entropy_slope(log_student: Tensor, log_other: Tensor) -> Tensor:
    """Return ``p (log p - log q)`` for the student's p."""
    return log_student.exp() * (log_student - log_other)


def _require_softening(loss: str, temperature: Any, chunk_size: Any) -> None:
    require_positive(loss, temperature=temperature)
    require_count(loss, chunk_size=chunk_size)


@register_loss("kl_divergence", "kl_div")
@final
@dataclass(frozen=True)
class KLDivergence(DivergenceLoss):
    """Forward Kullback-Leibler divergence, the classic distillation loss: the student covers all the teacher does.

    At each position: ``T^2 * sum_v p_v (log p_v - log q_v)`` with ``p = softmax(teacher / T)`` and
    ``q = softmax(student / T)`` (Hinton et al. 2015). The mean is taken over positions, never over the vocabulary.
    Shapes: ``[*positions, vocabulary]``; the mask has the shape ``[*positions]``.

    Args:
        temperature: T, above 0.
        chunk_size: positions processed at once; 0 leaves the choice to the loss. The result does not depend on it.
    """

    temperature: float = 1.0
    chunk_size: int = 0

    def __post_init__(self) -> None:
        _require_softening(self.name, self.temperature, self.chunk_size)

    def divergence(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """See :meth:`DivergenceLoss.divergence`."""
        return relative_entropy(log_teacher, log_student)

    def slope(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """See :meth:`DivergenceLoss.slope`."""
        return log_student.exp() - log_teacher.exp()


@register_loss("reverse_kl")
@final
@dataclass(frozen=True)
class ReverseKL(DivergenceLoss):
    """Reverse Kullback-Leibler divergence: the student puts no mass where the teacher has none.

    At each position: ``T^2 * sum_v q_v (log q_v - log p_v)`` with ``p = softmax(teacher / T)`` and
    ``q = softmax(student / T)`` (MiniLLM, Gu et al. 2024).
    Shapes: ``[*positions, vocabulary]``; the mask has the shape ``[*positions]``.

    Args:
        temperature: T, above 0.
        chunk_size: positions processed at once; 0 leaves the choice to the loss. The result does not depend on it.
    """

    temperature: float = 1.0
    chunk_size: int = 0

    def __post_init__(self) -> None:
        _require_softening(self.name, self.temperature, self.chunk_size)

    def divergence(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """See :meth:`DivergenceLoss.divergence`."""
        return relative_entropy(log_student, log_teacher)

    def slope(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """See :meth:`DivergenceLoss.slope`."""
        return entropy_slope(log_student, log_teacher)


@register_loss("jsd")
@final
@dataclass(frozen=True)
class JensenShannon(DivergenceLoss):
    """Generalised Jensen-Shannon divergence, between forward and reverse KL and bounded.

    At each position, with ``p = softmax(teacher / T)``, ``q = softmax(student / T)`` and
    ``m = beta p + (1 - beta) q``: ``T^2 * (beta KL(p || m) + (1 - beta) KL(q || m))`` (GKD, Agarwal et al. 2024).
    ``beta=0.5`` is the symmetrical divergence. At the ends the formula gives 0, and the limits after division by beta
    or 1 - beta are taken in its place, as is usual: ``beta=0`` is forward KL and ``beta=1`` reverse KL.
    Shapes: ``[*positions, vocabulary]``; the mask has the shape ``[*positions]``.

    Args:
        temperature: T, above 0.
        beta: weight of the teacher in the mixture, from 0 to 1.
        chunk_size: positions processed at once; 0 leaves the choice to the loss. The result does not depend on it.
    """

    temperature: float = 1.0
    beta: float = 0.5
    chunk_size: int = 0

    def __post_init__(self) -> None:
        _require_softening(self.name, self.temperature, self.chunk_size)
        require(lambda number: 0 <= number <= 1, self.name, "beta", self.beta, "a number from 0 to 1")

    def divergence(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """See :meth:`DivergenceLoss.divergence`."""
        if self.beta == 0:
            return relative_entropy(log_teacher, log_student)
        if self.beta == 1:
            return relative_entropy(log_student, log_teacher)
        log_mixture = self._log_mixture(log_student, log_teacher)
        teacher, student = (relative_entropy(side, log_mixture) for side in (log_teacher, log_student))
        return self.beta * teacher + (1 - self.beta) * student

    def slope(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """See :meth:`DivergenceLoss.slope`."""
        if self.beta == 0:
            return log_student.exp() - log_teacher.exp()
        if self.beta == 1:
            return entropy_slope(log_student, log_teacher)
        # What moves through the mixture adds up to nothing: m is the minimiser of the weighted sum.
        return (1 - self.beta) * entropy_slope(log_student, self._log_mixture(log_student, log_teacher))

    def _log_mixture(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        return torch.logaddexp(log_student + math.log1p(-self.beta), log_teacher + math.log(self.beta))

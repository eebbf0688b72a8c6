"""What makes logits of a language model's final hidden states."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses.divergences import JensenShannon, KLDivergence, ReverseKL
from silverspoon_kd.losses.inputs import check_vocabularies, require, require_positive, valid_positions

# The label of a position that predicts none, as torch has it.
IGNORED = -100


@dataclass(frozen=True, eq=False)
class OutputHead:
    """``logits = cap(scale * (hidden @ weight.T + bias))`` with ``cap(z) = soft_cap * tanh(z / soft_cap)``.

    Attributes:
        weight: ``[vocabulary, hidden]``.
        bias: ``[vocabulary]``; None for none. -inf rules a token out.
        scale: factor of the logits (``logit_scale``; the reciprocal of ``logits_scaling``), finite and not 0.
        soft_cap: bound of the logits (``final_logit_softcapping``), above 0; None for none.
    """

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    soft_cap: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if not isinstance(self.weight, Tensor) or self.weight.dim() != 2:
            shape = list(self.weight.shape) if isinstance(self.weight, Tensor) else type(self.weight).__name__
            raise LossError(f"{name}: the weight {shape} must be a matrix [vocabulary, hidden].")
        if self.bias is not None and self.bias.shape != self.weight.shape[:1]:
            raise LossError(
                f"{name}: the bias {list(self.bias.shape)} does not belong to the weight {list(self.weight.shape)}; it "
                f"must be [{self.weight.shape[0]}]."
            )
        require(lambda number: math.isfinite(number) and number != 0, name, "scale", self.scale, "finite and not 0")
        if self.soft_cap is not None:
            require_positive(name, soft_cap=self.soft_cap)

    def detached(self) -> "OutputHead":
        """Return the same head, outside of the graph."""
        bias = None if self.bias is None else self.bias.detach()
        return replace(self, weight=self.weight.detach(), bias=bias)


def mixture_of(loss: Any) -> float:
    """Return the teacher's weight in the mixture of a generalised Jensen-Shannon divergence: 0 for KL, 1 for reverse.

    Raises:
        LossError: the loss is none of the three.
    """
    if isinstance(loss, JensenShannon):
        return float(loss.beta)
    if isinstance(loss, (KLDivergence, ReverseKL)):
        return float(isinstance(loss, ReverseKL))
    raise LossError(
        f"{getattr(loss, 'name', type(loss).__name__)} cannot be computed without logits. Use kl_divergence, "
        "reverse_kl or jsd, or give the loss whole logits."
    )


def check_heads(
    loss: Any,
    student: Tensor,
    student_head: OutputHead,
    teacher: Tensor,
    teacher_head: OutputHead,
    mask: Tensor | None,
    chunk_bytes: int,
) -> tuple[Tensor, int]:
    """Return the bool mask of the positions and the number of logits that both heads share.

    Raises:
        LossError: the hidden states, heads and mask do not belong together, or chunk_bytes is no size.
    """
    mixture_of(loss)
    require(lambda number: number == int(number) > 0, loss.name, "chunk_bytes", chunk_bytes, "a whole number above 0")
    logits = []
    for side, hidden, head in (("student", student, student_head), ("teacher", teacher, teacher_head)):
        if not isinstance(hidden, Tensor) or hidden.dim() == 0 or hidden.shape[-1] != head.weight.shape[1]:
            shape = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
            raise LossError(
                f"{loss.name}: the {side}'s hidden states {shape} do not fit its head {list(head.weight.shape)}; they "
                f"must be [*positions, {head.weight.shape[1]}]."
            )
        if not student.device == hidden.device == head.weight.device:
            raise LossError(
                f"{loss.name}: the {side}'s hidden states are on {hidden.device} and its head on {head.weight.device}; "
                f"both must be where the student's hidden states are, on {student.device}."
            )
        # Only the shape is looked at, and a tensor on "meta" has nothing else.
        logits.append(torch.empty((*hidden.shape[:-1], head.weight.shape[0]), device="meta"))
    return valid_positions(loss.name, student, mask), check_vocabularies(loss.name, *logits)


def check_labels(loss: Any, student: Tensor, labels: Any) -> Tensor:
    """Return labels on the student's device.

    Raises:
        LossError: they are not one whole number for each position.
    """
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.shape != student.shape[:-1]:
        shape = f"{labels.dtype} {list(labels.shape)}" if isinstance(labels, Tensor) else type(labels).__name__
        raise LossError(
            f"{loss.name}: the labels {shape} must be whole numbers, one for each of the positions "
            f"{list(student.shape[:-1])} of the student's hidden states."
        )
    return labels.to(student.device)

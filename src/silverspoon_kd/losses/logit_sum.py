"""How losses on logits are summed: block by block, without a float32 copy of all logits.

Logits are the largest tensors of a training step. Positions are processed block by block, in the forward and again in
the backward, where the gradient is formed directly in the student's dtype.
"""

import abc
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from silverspoon_kd.losses.base import Loss, LossSum, Positions
from silverspoon_kd.losses.inputs import check_vocabularies, full_precision, valid_positions, working_dtype

# Logits in a block when no chunk size is asked for: 16 MiB in float32, enough to keep a device busy.
BLOCK_ELEMENTS = 2**22


class DivergenceLoss(Loss):
    """A loss on logits: a divergence of two distributions at each position, softened by a temperature T.

    The value at a position is ``T^2 * D(softmax(teacher / T), softmax(student / T))``; T^2 keeps the size of the
    gradients when T changes (Hinton et al. 2015). Concrete losses have the two fields.

    Attributes:
        temperature: T, above 0.
        chunk_size: positions in a block; 0 leaves the choice to the loss. The result does not depend on it.
    """

    positions: ClassVar[Positions] = "targets"
    temperature: float
    chunk_size: int

    @final
    def sum_and_count(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> LossSum:
        """See :meth:`Loss.sum_and_count`; both sides are logits ``[*positions, vocabulary]``."""
        vocabulary = check_vocabularies(self.name, student, teacher)
        return divergence_sum(self, student, teacher, valid_positions(self.name, student, mask), vocabulary)

    @abc.abstractmethod
    def divergence(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """Return D at each position, ``[n]``, for log-probabilities ``[n, vocabulary]``, all finite."""

    @abc.abstractmethod
    def slope(self, log_student: Tensor, log_teacher: Tensor) -> Tensor:
        """Return the derivative of D by each of the student's log-probabilities, ``[n, vocabulary]``.

        A term that is a multiple of the student's probabilities may be left out: it cannot move the logits.
        """


def divergence_sum(
    loss: DivergenceLoss, student: Tensor, teacher: Tensor, valid: Tensor, vocabulary: int, head: Tensor | None = None
) -> LossSum:
    """Sum a divergence over the valid positions, block by block.

    Args:
        loss: the divergence, its temperature and its chunk size.
        student: logits ``[*positions, vocabulary]``, or hidden states ``[*positions, hidden]`` when ``head`` is given.
        teacher: as the student.
        valid: ``[*positions]``, bool.
        vocabulary: how many logits, from the first, take part.
        head: ``[vocabulary, hidden]``, applied to both sides first; gets no gradient.
    """
    num_rows = valid.numel()
    recipe = _Recipe(
        loss=loss,
        vocabulary=vocabulary,
        rows_per_block=int(loss.chunk_size) or max(1, BLOCK_ELEMENTS // max(1, vocabulary)),
        dtype=working_dtype(student, teacher),
    )
    with full_precision(student.device):
        # reshape copies nothing when the logits are contiguous, or contiguous but for a cut vocabulary.
        rows = (side.reshape(num_rows, side.shape[-1]) for side in (student, teacher.detach()))
        total = _DivergenceSum.apply(*rows, valid.reshape(num_rows), head, recipe)
        return LossSum(total, valid.sum().to(recipe.dtype))


@dataclass(frozen=True, eq=False)
class _Recipe:
    """How a block of positions becomes values and gradients."""

    loss: DivergenceLoss
    vocabulary: int  # logits that both sides share
    rows_per_block: int
    dtype: torch.dtype

    def blocks(self, num_rows: int) -> Iterator[slice]:
        for start in range(0, num_rows, self.rows_per_block):
            yield slice(start, start + self.rows_per_block)

    def log_probs(self, block: Tensor, head: Tensor | None) -> Tensor:
        block = block.to(self.dtype)
        logits = block[:, : self.vocabulary] if head is None else block @ head.T
        softened = logits if self.loss.temperature == 1 else logits / self.loss.temperature
        # A token that a model rules out has -inf. Its probability stays 0, but 0 * -inf would be NaN.
        return softened.log_softmax(-1).clamp_(min=torch.finfo(self.dtype).min / 4)

    def values(self, student: Tensor, teacher: Tensor, head: Tensor | None) -> Tensor:
        return self.loss.divergence(self.log_probs(student, head), self.log_probs(teacher, head))

    def logit_gradient(self, student: Tensor, teacher: Tensor, head: Tensor | None) -> Tensor:
        """Return the gradient of T^2 D by the student's logits, ``[rows, vocabulary]``."""
        log_student = self.log_probs(student, head)
        slope = self.loss.slope(log_student, self.log_probs(teacher, head))
        gradient = torch.addcmul(slope, log_student.exp(), slope.sum(-1, keepdim=True), value=-1)
        return gradient * self.loss.temperature  # T^2 of the loss and 1 / T of the softened logits


class _DivergenceSum(torch.autograd.Function):
    """The sum of a divergence over the valid positions, with its gradient by the student's logits.

    The backward computes the log-probabilities of a block once more. Gradients kept from the forward would cost no
    second pass, but they would be rounded before the loss scale of float16 training is applied, and underflow.
    """

    @staticmethod
    def forward(
        ctx: Any, student: Tensor, teacher: Tensor, valid: Tensor, head: Tensor | None, recipe: _Recipe
    ) -> Tensor:
        ctx.save_for_backward(student, teacher, valid, head)
        ctx.recipe = recipe
        head = None if head is None else head.to(recipe.dtype)
        values = torch.zeros(valid.shape, dtype=recipe.dtype, device=student.device)
        for rows in recipe.blocks(len(student)):
            values[rows] = recipe.values(student[rows], teacher[rows], head)
        return values.where(valid, values.new_zeros(())).sum() * recipe.loss.temperature**2

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Tensor | None, ...]:
        student, teacher, valid, head = ctx.saved_tensors
        recipe: _Recipe = ctx.recipe
        grad = torch.zeros_like(student)
        # The backward may be called inside the caller's autocast region.
        with full_precision(student.device):
            head = None if head is None else head.to(recipe.dtype)
            for rows in recipe.blocks(len(student)):
                block = recipe.logit_gradient(student[rows], teacher[rows], head) * grad_total
                block = block.where(valid[rows, None], block.new_zeros(()))
                block = block if head is None else block @ head
                grad[rows, : block.shape[-1]] = block
        return grad, None, None, None, None

"""The logit lens: hidden states compared as the next-token distributions they stand for."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, final

from torch import Tensor

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses.base import Loss, LossSum
from silverspoon_kd.losses.divergences import KLDivergence
from silverspoon_kd.losses.inputs import check_shapes, valid_positions
from silverspoon_kd.losses.logit_sum import divergence_sum
from silverspoon_kd.losses.registry import register_loss


@register_loss("logit_lens_kl")
@final
@dataclass(frozen=True, eq=False)
class LogitLensKL(Loss):
    """Forward KL between the tokens that both hidden states predict through the teacher's output head.

    At each position: ``T^2 * KL(softmax(W t / T) || softmax(W s / T))`` with the head's weight W (logit lens,
    nostalgebraist 2020; KL of Hinton et al. 2015). The hidden states are taken as they come; a bias, and a final norm
    before the head, are left out. W gets no gradient.
    Shapes: ``[*positions, hidden]``; the mask has the shape ``[*positions]``. The logits of one block of positions
    exist at a time; a W of another dtype is copied in float32 for the time of the call.

    Args:
        head: W, ``[vocabulary, hidden]``; None until :meth:`with_head` gives it.
        temperature: T, above 0.
        chunk_size: positions processed at once; 0 leaves the choice to the loss. The result does not depend on it.
    """

    needs_head: ClassVar[bool] = True

    head: Tensor | None = field(default=None, repr=False)
    temperature: float = 1.0
    chunk_size: int = 0

    def __post_init__(self) -> None:
        self._divergence()
        if self.head is not None and self.head.dim() != 2:
            raise LossError(f"{self.name}: the head {list(self.head.shape)} must be a matrix [vocabulary, hidden].")

    def with_head(self, weight: Tensor) -> "LogitLensKL":
        """Return the same loss with the weight ``[vocabulary, hidden]`` of the teacher's output head."""
        return replace(self, head=weight.detach())

    def sum_and_count(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> LossSum:
        """See :meth:`Loss.sum_and_count`.

        Raises:
            LossError: also when there is no head, or the head is for another hidden size.
        """
        check_shapes(self.name, student, teacher)
        if self.head is None:
            raise LossError(f"{self.name} has no output head. Call with_head(weight) first, or pass head=weight.")
        if self.head.shape[1] != student.shape[-1]:
            raise LossError(
                f"{self.name}: the head {list(self.head.shape)} takes hidden states of size {self.head.shape[1]}, but "
                f"those compared are {list(student.shape)}. Both sides need the teacher's hidden size; "
                "project the student's."
            )
        valid = valid_positions(self.name, student, mask)
        head = self.head.detach().to(student.device)
        return divergence_sum(self._divergence(), student, teacher, valid, vocabulary=head.shape[0], head=head)

    def _divergence(self) -> KLDivergence:
        return KLDivergence(temperature=self.temperature, chunk_size=self.chunk_size)

"""Attention-map transfer: where the teacher looks."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses.base import Layout, Loss, LossSum, sum_over
from silverspoon_kd.losses.inputs import check_tensors, full_precision, pair_up, working_dtype
from silverspoon_kd.losses.registry import register_loss


@register_loss("attention")
@final
@dataclass(frozen=True)
class AttentionTransfer(Loss):
    """Squared difference of the attention probabilities.

    At each query: ``sum_h sum_k (A_hk(student) - A_hk(teacher))^2 / heads`` (TinyBERT, Jiao et al. 2020, who use the
    maps of one layer the same way). Summed and not averaged over the keys: each row of a map sums to 1 whatever its
    length, and a padded key, which has probability 0 on both sides, must change nothing. With different numbers of
    heads each side is first averaged over its heads, and ``heads`` is 1.
    Shapes: ``[batch, heads, query, key]``, after the softmax; the mask ``[batch, query]`` says which queries count.
    """

    layout: ClassVar[Layout] = "attention"

    def sum_and_count(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> LossSum:
        """See :meth:`Loss.sum_and_count`."""
        _check_maps(self.name, student, teacher)
        with full_precision(student.device):
            if student.shape[1] != teacher.shape[1]:
                dtype = working_dtype(student, teacher)
                student, teacher = (side.to(dtype).mean(1, keepdim=True) for side in (student, teacher))
            num_heads = student.shape[1]
            # The keys of all heads become the features of a query: [batch, query, heads * key].
            rows, target = (side.transpose(1, 2).flatten(2) for side in (student, teacher))
            pair = pair_up(self.name, rows, target, mask)
            return sum_over((pair.student - pair.teacher).square().sum(-1) / num_heads, pair.valid)


def _check_maps(loss: str, student: Tensor, teacher: Tensor) -> None:
    check_tensors(loss, student, teacher)
    shapes = f"the student's is {list(student.shape)} and the teacher's {list(teacher.shape)}"
    if student.dim() != 4 or teacher.dim() != 4:
        raise LossError(
            f"{loss}: attention maps are [batch, heads, query, key], but {shapes}. Models return their maps with "
            "attn_implementation='eager' and output_attentions=True."
        )
    if (student.shape[0], *student.shape[2:]) != (teacher.shape[0], *teacher.shape[2:]):
        raise LossError(
            f"{loss}: attention maps may differ in their number of heads only, but {shapes}. Both models must see the "
            "same batch."
        )

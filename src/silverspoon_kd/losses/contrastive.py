"""Contrastive distillation: which position of the teacher belongs to this position of the student?"""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from silverspoon_kd.losses.base import PositionLoss
from silverspoon_kd.losses.inputs import require_positive
from silverspoon_kd.losses.pointwise import unit
from silverspoon_kd.losses.registry import register_loss


@register_loss("contrastive")
@final
@dataclass(frozen=True)
class Contrastive(PositionLoss):
    """InfoNCE with the teacher's vector of the same position as the positive.

    At position i: ``-log(exp(cos(s_i, t_i) / T) / sum_j exp(cos(s_i, t_j) / T))`` where j runs over all positions of
    the batch that count (CPC, van den Oord et al. 2018; CRD, Tian et al. 2020). A lone position gives 0.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``. Memory: n^2 similarities for n
    positions, masked-out ones included.

    Args:
        temperature: T, above 0.
    """

    temperature: float = 0.07

    def __post_init__(self) -> None:
        require_positive(self.name, temperature=self.temperature)

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        similarity = unit(student) @ unit(teacher).T / self.temperature  # [n anchors, n candidates]
        # The lowest number and not -inf: in a batch that is all masked, a row of -inf would have NaN gradients.
        similarity = similarity.masked_fill(~valid, torch.finfo(similarity.dtype).min)
        return -similarity.log_softmax(-1).diagonal()

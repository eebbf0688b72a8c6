"""Centered kernel alignment: the same representation up to rotation and scale."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from silverspoon_kd.losses.base import BatchLoss
from silverspoon_kd.losses.registry import register_loss


@register_loss("cka")
@final
@dataclass(frozen=True)
class LinearCKA(BatchLoss):
    """One minus linear CKA.

    ``1 - |Y^T X|^2 / (|X^T X| |Y^T Y|)`` with Frobenius norms, where X and Y hold the student's and the teacher's
    vectors of the positions that count, one a row, each column centred (Kornblith et al. 2019). Between 0 and 1;
    rotations and scaling of either side change nothing. Fewer than two positions give 0; a side whose rows are all
    equal gives 1.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.
    """

    def value(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`BatchLoss.value`."""
        x, y = (_centred(side, valid) for side in (student, teacher))
        if x.shape[0] <= x.shape[1]:
            # Fewer rows than columns: |Y^T X|^2 is the inner product of the two Gram matrices, which are then smaller.
            grams = x @ x.T, y @ y.T
            shared = (grams[0] * grams[1]).sum()
        else:
            grams = x.T @ x, y.T @ y
            shared = (y.T @ x).square().sum()
        sizes = torch.linalg.vector_norm(grams[0]) * torch.linalg.vector_norm(grams[1])
        alignment = shared / sizes.where(sizes > 0, torch.ones_like(sizes))
        return (1 - alignment).where(valid.sum() > 1, alignment.new_zeros(()))


def _centred(vectors: Tensor, valid: Tensor) -> Tensor:
    """Centre the valid rows and bring them to Frobenius norm 1; rows that do not count become 0."""
    keep = valid.unsqueeze(-1).to(vectors.dtype)
    centred = (vectors - (vectors * keep).sum(0) / keep.sum().clamp(min=1)) * keep
    # CKA does not depend on the scale, so its gradient through the scale is 0; this only keeps fourth powers in range.
    scale = torch.linalg.vector_norm(centred.detach())
    return centred / scale.where(scale > 0, torch.ones_like(scale))

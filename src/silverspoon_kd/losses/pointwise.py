"""Losses that compare two vectors at each position."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from silverspoon_kd.losses.base import PositionLoss
from silverspoon_kd.losses.inputs import require_positive, require_weights
from silverspoon_kd.losses.registry import register_loss


def unit(vectors: Tensor) -> Tensor:
    """Scale the vectors of the last dimension to length 1; a zero vector stays zero and its gradient finite."""
    length = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length.where(length > 0, torch.ones_like(length))


def mean_square(vectors: Tensor) -> Tensor:
    """Return the mean of the squares over the last dimension."""
    return vectors.square().mean(-1)


def cosine_distance(student: Tensor, teacher: Tensor) -> Tensor:
    """Return 1 - cos over the last dimension; a zero vector counts as orthogonal to everything."""
    return 1 - (unit(student) * unit(teacher)).sum(-1)


@register_loss("mse")
@final
@dataclass(frozen=True)
class MeanSquaredError(PositionLoss):
    """Mean squared difference of the features.

    At each position, with d features: ``sum_k (s_k - t_k)^2 / d`` (FitNets, Romero et al. 2015).
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.
    """

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        return mean_square(student - teacher)


@register_loss("normalized_mse")
@final
@dataclass(frozen=True)
class NormalizedMSE(PositionLoss):
    """Squared difference relative to the size of the teacher's vector.

    At each position: ``sum_k (s_k - t_k)^2 / d / (sum_k t_k^2 / d + eps)``: 0 for equal vectors, about 1 for a student
    that gives zeros, and the same for layers of small and of large activations. This is the normalised mean squared
    error of signal processing.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.

    Args:
        eps: added to the teacher's mean square; above 0.
    """

    eps: float = 1e-6

    def __post_init__(self) -> None:
        require_positive(self.name, eps=self.eps)

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        return mean_square(student - teacher) / (mean_square(teacher) + self.eps)


@register_loss("cosine")
@final
@dataclass(frozen=True)
class CosineLoss(PositionLoss):
    """Angle between the vectors, whatever their lengths.

    At each position: ``1 - s.t / (|s| |t|)``, between 0 and 2 (as in DistilBERT, Sanh et al. 2019). A zero vector on
    either side gives 1.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.
    """

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        return cosine_distance(student, teacher)


@register_loss("smooth_l1")
@final
@dataclass(frozen=True)
class SmoothL1(PositionLoss):
    """Squared difference near zero, absolute difference far away, so that outlier features pull less.

    With ``u = |s_k - t_k|``, at each position the mean over the features of ``u^2 / (2 beta)`` where ``u < beta`` and
    ``u - beta / 2`` elsewhere (Fast R-CNN, Girshick 2015); ``beta=0`` is the absolute difference.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.

    Args:
        beta: where the square ends, in units of the features; 0 or more.
    """

    beta: float = 1.0

    def __post_init__(self) -> None:
        require_weights(self.name, beta=self.beta)

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        return functional.smooth_l1_loss(student, teacher, beta=self.beta, reduction="none").mean(-1)


@register_loss("angular_magnitude")
@final
@dataclass(frozen=True)
class AngularMagnitude(PositionLoss):
    """Direction and length of the vectors as two separate terms.

    At each position: ``angle_weight * angle(s, t) / pi + magnitude_weight * ((|s| - |t|) / (|t| + eps))^2``. The angle
    is ``2 atan2(|u - v|, |u + v|)`` of the unit vectors u and v (Kahan 2006): exact for tiny angles, and without the
    infinite gradient that arccos has at equal directions. A zero vector on one side counts as a right angle.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.

    Args:
        angle_weight: weight of the angle in half turns; 0 or more.
        magnitude_weight: weight of the squared relative error of the length; 0 or more.
        eps: added to the teacher's length; above 0.
    """

    angle_weight: float = 1.0
    magnitude_weight: float = 1.0
    eps: float = 1e-6

    def __post_init__(self) -> None:
        require_weights(self.name, angle_weight=self.angle_weight, magnitude_weight=self.magnitude_weight)
        require_positive(self.name, eps=self.eps)

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        length, target = (torch.linalg.vector_norm(side, dim=-1) for side in (student, teacher))
        magnitude = ((length - target) / (target + self.eps)).square()
        return self.angle_weight * _half_turns(student, teacher) + self.magnitude_weight * magnitude


def _half_turns(student: Tensor, teacher: Tensor) -> Tensor:
    u, v = unit(student), unit(teacher)
    apart, together = torch.linalg.vector_norm(u - v, dim=-1), torch.linalg.vector_norm(u + v, dim=-1)
    # Two zero vectors: atan2(0, 0) has a NaN gradient.
    both_zero = (apart == 0) & (together == 0)
    return torch.atan2(apart, together.where(~both_zero, torch.ones_like(together))) * (2 / math.pi)

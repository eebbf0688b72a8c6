"""Relational distillation (Park et al. 2019): the student copies how the positions lie to each other."""

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.nn import functional

from silverspoon_kd.losses.base import BatchLoss
from silverspoon_kd.losses.inputs import require_count, require_weights
from silverspoon_kd.losses.registry import register_loss


def even_subset(student: Tensor, teacher: Tensor, valid: Tensor, limit: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return at most ``limit`` rows, evenly spread over the valid ones, and which of them are valid.

    With m valid rows and m > limit these are the valid rows number ``floor(k m / limit)``. A limit of 0 returns all
    rows. The sizes do not depend on the mask, so nothing waits for the device.
    """
    if limit == 0 or valid.shape[0] <= limit:
        return student, teacher, valid
    valid_first = valid.to(torch.int8).argsort(descending=True, stable=True)
    num_valid = valid.sum()
    steps = torch.arange(limit, device=valid.device)
    rows = valid_first[torch.where(num_valid > limit, steps * num_valid // limit, steps)]
    return student.index_select(0, rows), teacher.index_select(0, rows), steps < num_valid


def distances(points: Tensor) -> Tensor:
    """Return the Euclidean distances ``[n, n]`` between the rows; the gradient at distance 0 is 0."""
    # The quicker form through a matrix product loses small distances between long vectors.
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def angles(points: Tensor) -> Tensor:
    """Return ``cos`` of the angle at row j between rows i and k as ``[j, i, k]``; 0 where two of them coincide."""
    # Any shift leaves the angles as they are; a small common part keeps the differences below precise.
    points = points - points.detach().mean(0)
    gram = points @ points.T
    # (x_i - x_j) . (x_k - x_j), without the tensor of differences [n, n, features].
    inner = gram.unsqueeze(0) - gram.unsqueeze(2) - gram.unsqueeze(1) + gram.diagonal()[:, None, None]
    length = distances(points)
    lengths = length.unsqueeze(2) * length.unsqueeze(1)
    apart = lengths > 0
    return inner.where(apart, inner.new_zeros(())) / lengths.where(apart, inner.new_ones(()))


def distance_value(student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
    """Return the distance-wise loss of Park et al. 2019 over the valid rows."""
    pairs = _pairs(valid)
    relation, target = (_in_units_of_mean(distances(side), pairs) for side in (student, teacher))
    return _mean_huber(relation, target, pairs)


def angle_value(student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
    """Return the angle-wise loss of Park et al. 2019 over the valid rows."""
    pairs = _pairs(valid)
    triplets = pairs.unsqueeze(2) & pairs.unsqueeze(1) & pairs.unsqueeze(0)
    return _mean_huber(angles(student), angles(teacher), triplets)


def _pairs(valid: Tensor) -> Tensor:
    itself = torch.eye(valid.shape[0], dtype=torch.bool, device=valid.device)
    return valid.unsqueeze(0) & valid.unsqueeze(1) & ~itself


def _in_units_of_mean(distance: Tensor, pairs: Tensor) -> Tensor:
    mean = _mean_where(distance, pairs)
    return distance / mean.where(mean > 0, torch.ones_like(mean))


def _mean_huber(student: Tensor, teacher: Tensor, wanted: Tensor) -> Tensor:
    return _mean_where(functional.smooth_l1_loss(student, teacher, reduction="none"), wanted)


def _mean_where(values: Tensor, wanted: Tensor) -> Tensor:
    return values.where(wanted, values.new_zeros(())).sum() / wanted.sum().clamp(min=1)


@register_loss("relkd_distance")
@final
@dataclass(frozen=True)
class RelationalDistance(BatchLoss):
    """Distances between positions, in units of their mean (Park et al. 2019, distance-wise).

    With ``d_ij = |x_i - x_j| / mu`` and mu the mean of ``|x_i - x_j|`` over all pairs of different positions, on each
    side for itself: the mean over these pairs of ``huber(d_ij(student) - d_ij(teacher))``, where ``huber(u)`` is
    ``u^2 / 2`` up to 1 and ``|u| - 1/2`` beyond. Fewer than two positions give 0.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.

    Args:
        max_positions: the pairs are those of so many positions, evenly spread over those that count; 0 for all. The
            work grows with its square.
    """

    max_positions: int = 256

    def __post_init__(self) -> None:
        require_count(self.name, max_positions=self.max_positions)

    def value(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`BatchLoss.value`."""
        return distance_value(*even_subset(student, teacher, valid, self.max_positions))


@register_loss("relkd_angle")
@final
@dataclass(frozen=True)
class RelationalAngle(BatchLoss):
    """Angles of all triangles between positions (Park et al. 2019, angle-wise).

    With ``a_ijk = cos`` of the angle at j between i and k: the mean over all ordered triplets of different positions
    of ``huber(a_ijk(student) - a_ijk(teacher))``, where ``huber(u)`` is ``u^2 / 2`` up to 1 and ``|u| - 1/2`` beyond.
    Fewer than three positions give 0.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.

    Args:
        max_positions: the triplets are those of so many positions, evenly spread over those that count; 0 for all. Work
            and memory grow with its cube.
    """

    max_positions: int = 128

    def __post_init__(self) -> None:
        require_count(self.name, max_positions=self.max_positions)

    def value(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`BatchLoss.value`."""
        return angle_value(*even_subset(student, teacher, valid, self.max_positions))


@register_loss("relkd_distance_angle", "relkd_da")
@final
@dataclass(frozen=True)
class RelationalDistanceAngle(BatchLoss):
    """Weighted sum of ``relkd_distance`` and ``relkd_angle`` (Park et al. 2019).

    ``distance_weight * distance + angle_weight * angle``, with the paper's weights 1 and 2 by default.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``.

    Args:
        distance_weight: 0 or more.
        angle_weight: 0 or more.
        max_positions: pairs and triplets are those of so many positions, evenly spread over those that count; 0 for
            all. Work and memory grow with its cube.
    """

    distance_weight: float = 1.0
    angle_weight: float = 2.0
    max_positions: int = 128

    def __post_init__(self) -> None:
        require_weights(self.name, distance_weight=self.distance_weight, angle_weight=self.angle_weight)
        require_count(self.name, max_positions=self.max_positions)

    def value(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`BatchLoss.value`."""
        subset = even_subset(student, teacher, valid, self.max_positions)
        return self.distance_weight * distance_value(*subset) + self.angle_weight * angle_value(*subset)

"""Distances in the teacher's own metric: directions in which the teacher varies little count more.

The metric is the inverse covariance (precision) of the teacher's vectors, so features of large variance, such as the
few huge activations of language models, do not drown the others.
"""

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses.base import PositionLoss
from silverspoon_kd.losses.inputs import require, require_positive
from silverspoon_kd.losses.pointwise import cosine_distance, mean_square
from silverspoon_kd.losses.registry import register_loss


def covariance(vectors: Tensor, valid: Tensor, shrinkage: float, eps: float) -> Tensor:
    """Return the covariance of the valid rows, ``[d, d]``, shrunk towards a multiple of the identity.

    ``(1 - shrinkage) C + (shrinkage * trace(C) / d + eps) I`` with ``C = sum_i (x_i - mean)(x_i - mean)^T / n``
    (Ledoit and Wolf 2004). It is positive definite for any n.
    """
    weights = valid.to(vectors.dtype).unsqueeze(-1)
    num_valid = weights.sum().clamp(min=1)
    centred = (vectors - (vectors * weights).sum(0) / num_valid) * weights
    plain = centred.T @ centred / num_valid
    ridge = shrinkage * plain.diagonal().mean() + eps
    return (1 - shrinkage) * plain + torch.diag(ridge.expand(plain.shape[0]))


@dataclass(frozen=True, eq=False)
class _Metric:
    """Where the precision comes from: given, or estimated from each batch."""

    loss: str
    shrinkage: float
    eps: float
    precision: Tensor | None

    def whiten(self, student: Tensor, teacher: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """Map both sides ``[n, d]`` so that plain inner products become those of the metric."""
        if self.precision is None:
            root = _lower(covariance(teacher, valid, self.shrinkage, self.eps))
            # cov = L L^T, so x -> L^-1 x has the inner product x^T cov^-1 y.
            return _solve(root, student), _solve(root, teacher)
        if self.precision.shape[0] != student.shape[-1]:
            raise LossError(
                f"{self.loss}: the precision {list(self.precision.shape)} does not fit vectors of {student.shape[-1]} "
                "features. Give the precision of the aligned output, or none to have it estimated from each batch."
            )
        root = _lower(self.precision.detach().to(student))
        return student @ root, teacher @ root


def _lower(matrix: Tensor) -> Tensor:
    # The checking form would wait for the device.
    return torch.linalg.cholesky_ex(matrix).L


def _solve(root: Tensor, vectors: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(root, vectors.T, upper=False).T


def _check_options(loss: str, shrinkage: Any, eps: Any, precision: Any) -> None:
    require(lambda number: 0 <= number <= 1, loss, "shrinkage", shrinkage, "a number from 0 to 1")
    require_positive(loss, eps=eps)
    if precision is None:
        return
    if not isinstance(precision, Tensor) or precision.dim() != 2 or precision.shape[0] != precision.shape[1]:
        what = list(precision.shape) if isinstance(precision, Tensor) else type(precision).__name__
        raise LossError(f"{loss}: precision is {what}, but must be a square tensor [features, features].")
    symmetric = torch.allclose(precision, precision.T, rtol=1e-4, atol=1e-6 * float(precision.abs().max()))
    if not symmetric or int(torch.linalg.cholesky_ex(precision.double()).info):
        raise LossError(
            f"{loss}: the precision {list(precision.shape)} must be symmetric and positive definite. Add a small "
            "multiple of the identity to the covariance before it is inverted."
        )


@register_loss("mahalanobis_mse", "mahal_mse")
@final
@dataclass(frozen=True, eq=False)
class MahalanobisMSE(PositionLoss):
    """Squared Mahalanobis distance, divided by the number of features.

    At each position: ``(s - t)^T P (s - t) / d`` (Mahalanobis 1936). P is ``precision``, or the inverse of the
    covariance of the teacher's vectors at the positions of this batch that count,
    ``(1 - a) C + (a * trace(C) / d + eps) I`` with the shrinkage a (Ledoit and Wolf 2004). With P = I this is ``mse``.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``. Work: d^3 for each call.

    Args:
        shrinkage: a, from 0 to 1; an estimate from fewer positions than features needs it.
        eps: smallest variance, in squared units of the features; above 0.
        precision: P, ``[features, features]``, symmetric and positive definite; None estimates it from each batch.
    """

    shrinkage: float = 0.1
    eps: float = 1e-6
    precision: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_options(self.name, self.shrinkage, self.eps, self.precision)

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        metric = _Metric(self.name, self.shrinkage, self.eps, self.precision)
        whitened, target = metric.whiten(student, teacher, valid)
        return mean_square(whitened - target)


@register_loss("mahalanobis_cosine", "mahal_cosine")
@final
@dataclass(frozen=True, eq=False)
class MahalanobisCosine(PositionLoss):
    """Angle between the vectors in the teacher's metric.

    At each position: ``1 - s^T P t / sqrt(s^T P s * t^T P t)``, with P as in :class:`MahalanobisMSE`. The vectors
    themselves are not centred. With P = I this is ``cosine``.
    Shapes: ``[*positions, features]``; the mask has the shape ``[*positions]``. Work: d^3 for each call.

    Args:
        shrinkage: from 0 to 1; an estimate from fewer positions than features needs it.
        eps: smallest variance, in squared units of the features; above 0.
        precision: P, ``[features, features]``, symmetric and positive definite; None estimates it from each batch.
    """

    shrinkage: float = 0.1
    eps: float = 1e-6
    precision: Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        _check_options(self.name, self.shrinkage, self.eps, self.precision)

    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """See :meth:`PositionLoss.values`."""
        metric = _Metric(self.name, self.shrinkage, self.eps, self.precision)
        return cosine_distance(*metric.whiten(student, teacher, valid))

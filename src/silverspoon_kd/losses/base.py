"""What a loss is: two tensors and a mask in, a sum and a count out.

A sum and a count, and not a mean, because one batch is often seen in parts: micro-batches of an accumulation step,
ranks of a data-parallel run. Whoever has all parts adds the sums, adds the counts and divides once.
"""

import abc
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from silverspoon_kd.losses.inputs import Pair, full_precision, pair_up

Positions = Literal["tokens", "targets"]
Layout = Literal["positions", "attention"]


@final
@dataclass(frozen=True, eq=False)
class LossSum:
    """A loss before its division.

    Attributes:
        total: 0-dim, float32 (float64 when both inputs are float64), differentiable with respect to the student.
        count: 0-dim, same dtype, no gradient: how many positions ``total`` sums over.
    """

    total: Tensor
    count: Tensor

    def mean(self) -> Tensor:
        """Return ``total / count``; a count of 0 gives 0 with zero gradients."""
        return self.total / self.count.clamp(min=1)


class Loss(abc.ABC):
    """Compares what the student gives with what the teacher gives; the student always comes first.

    Concrete losses are final frozen dataclasses; their fields are the hyperparameters. All of them compute in float32
    (float64 when both inputs are float64) with autocast off, detach the teacher, never broadcast, never wait for the
    device, and never look at values of masked-out positions, not even at a NaN there.

    Attributes:
        name: the registered name; the name of the class until :func:`register_loss` gives one.
        positions: which mask belongs to the loss: ``"tokens"``, the positions that are no padding, or ``"targets"``,
            the positions whose logits predict a label.
        layout: ``"positions"`` for ``[*positions, features]``, ``"attention"`` for ``[batch, heads, query, key]``.
        needs_head: True when the loss cannot run before ``loss.with_head(weight)`` gave it the teacher's output head.
    """

    name: ClassVar[str]
    positions: ClassVar[Positions] = "tokens"
    layout: ClassVar[Layout] = "positions"
    needs_head: ClassVar[bool] = False

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:
            cls.name = cls.__name__

    @abc.abstractmethod
    def sum_and_count(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> LossSum:
        """Return the sum of the loss over the positions that count, and their number.

        Args:
            student: ``[*positions, features]``, any floating dtype.
            teacher: as the student; never gets a gradient.
            mask: ``[*positions]``, bool or integer, non-zero where a position counts; None counts all.

        Raises:
            LossError: the shapes do not belong together, or the mask is no mask.
        """

    @final
    def __call__(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the mean over the positions that count: 0-dim, 0 with zero gradients when none counts."""
        return self.sum_and_count(student, teacher, mask).mean()


class PositionLoss(Loss):
    """A loss with one value for each position; ``total`` is their sum and ``count`` their number."""

    @final
    def sum_and_count(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> LossSum:
        """See :meth:`Loss.sum_and_count`."""
        pair = pair_up(self.name, student, teacher, mask)
        with full_precision(student.device):
            return sum_over(self.values(*pair), pair.valid)

    @abc.abstractmethod
    def values(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """Return the value of each position, ``[n]``, for ``[n, features]`` inputs and the bool mask ``[n]``.

        Masked-out rows hold ones on both sides; their values are discarded but must be finite, as must their gradients.
        """


class BatchLoss(Loss):
    """A loss with one value for all positions together.

    ``count`` is the number n of positions that count and ``total`` is n times the value, so that parts of a batch are
    averaged by their size.
    """

    @final
    def sum_and_count(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> LossSum:
        """See :meth:`Loss.sum_and_count`."""
        pair = pair_up(self.name, student, teacher, mask)
        with full_precision(student.device):
            count = count_of(pair)
            return LossSum(self.value(*pair) * count, count)

    @abc.abstractmethod
    def value(self, student: Tensor, teacher: Tensor, valid: Tensor) -> Tensor:
        """Return the 0-dim value for ``[n, features]`` inputs and the bool mask ``[n]``.

        Masked-out rows hold ones on both sides. The value must be finite for any number of valid rows, 0 included.
        """


def count_of(pair: Pair) -> Tensor:
    """Return the number of valid positions as a 0-dim tensor of the working dtype."""
    return pair.valid.sum().to(pair.teacher.dtype)


def sum_over(values: Tensor, valid: Tensor) -> LossSum:
    """Add the values of the valid positions; both tensors have the same shape."""
    # `where` and not a product: the value of a position that does not count may be anything.
    return LossSum(values.where(valid, values.new_zeros(())).sum(), valid.sum().to(values.dtype))

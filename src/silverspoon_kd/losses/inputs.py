"""Checks of what a loss is given, and the common form in which the losses compute."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from logging import getLogger
from typing import Any, NamedTuple

import torch
from torch import Tensor

from silverspoon_kd.errors import LossError

logger = getLogger(__name__)

# Rows that a padded embedding may have more than the other model's. Real paddings are a few hundred rows at most.
MAX_VOCABULARY_GAP = 1024


class Pair(NamedTuple):
    """Both sides in the working dtype, one row for each position."""

    student: Tensor  # [n, features]; ones where not valid
    teacher: Tensor  # [n, features]; ones where not valid; no gradient
    valid: Tensor  # [n], bool


def pair_up(loss: str, student: Tensor, teacher: Tensor, mask: Tensor | None) -> Pair:
    """Check both sides and the mask, and bring them into the form in which losses compute.

    Masked-out rows become ones. Ones and not zeros: the direction of a zero vector, and the gradient of its length, do
    not exist, and a gradient of 0 times NaN is NaN.
    """
    check_shapes(loss, student, teacher)
    valid = valid_positions(loss, student, mask)
    dtype = working_dtype(student, teacher)
    rows = (math.prod(student.shape[:-1]), student.shape[-1])
    student, teacher = student.to(dtype), teacher.detach().to(dtype)
    if mask is not None:
        keep, one = valid.unsqueeze(-1), student.new_ones(())
        student, teacher = student.where(keep, one), teacher.where(keep, one)
    return Pair(student.reshape(rows), teacher.reshape(rows), valid.reshape(rows[0]))


def check_shapes(loss: str, student: Tensor, teacher: Tensor) -> None:
    """Raise :class:`LossError` unless both are tensors of one shape ``[*positions, features]``."""
    check_tensors(loss, student, teacher)
    if student.shape != teacher.shape:
        raise LossError(
            f"{loss}: the student's tensor {list(student.shape)} and the teacher's {list(teacher.shape)} differ in "
            f"shape. {_shape_advice(student, teacher)}"
        )


def check_tensors(loss: str, student: Tensor, teacher: Tensor) -> None:
    """Raise :class:`LossError` unless both sides are tensors with at least one dimension."""
    for side, value in (("student", student), ("teacher", teacher)):
        if not isinstance(value, Tensor):
            raise LossError(
                f"{loss}: the {side}'s value is a {type(value).__name__}, not a tensor. "
                "Choose one element of the module's output, for example with output_selector_index=0."
            )
        if value.dim() == 0:
            raise LossError(f"{loss}: the {side}'s tensor has no dimensions; a loss needs [*positions, features].")


def check_vocabularies(loss: str, student: Tensor, teacher: Tensor) -> int:
    """Return the number of logits that both sides share.

    Models of one tokenizer may differ in their last, unused rows only, because embeddings are padded to a multiple.

    Raises:
        LossError: the leading dimensions differ, or the gap is too large to be padding.
    """
    check_tensors(loss, student, teacher)
    if student.shape[:-1] != teacher.shape[:-1]:
        check_shapes(loss, student, teacher)
    sizes = (student.shape[-1], teacher.shape[-1])
    gap = abs(sizes[0] - sizes[1])
    if gap > MAX_VOCABULARY_GAP or 2 * gap > max(sizes):
        raise LossError(
            f"{loss}: the student has {sizes[0]} logits and the teacher {sizes[1]} (shapes {list(student.shape)} and "
            f"{list(teacher.shape)}). A difference of {gap} rows is no padding of one vocabulary: logits can be "
            "compared only between models of the same tokenizer. Use such a pair, or a loss on hidden states."
        )
    if gap:
        _warn_of_padding(loss, *sizes)
    return min(sizes)


def valid_positions(loss: str, student: Tensor, mask: Tensor | None) -> Tensor:
    """Return the bool mask of the leading dimensions of ``student``, on its device."""
    shape = student.shape[:-1]
    if mask is None:
        return torch.ones(shape, dtype=torch.bool, device=student.device)
    if not isinstance(mask, Tensor) or mask.is_floating_point() or mask.is_complex():
        kind = str(mask.dtype) if isinstance(mask, Tensor) else type(mask).__name__
        raise LossError(f"{loss}: the mask is {kind}, but must be a bool or integer tensor, non-zero where it counts.")
    if mask.shape != shape:
        raise LossError(
            f"{loss}: the mask {list(mask.shape)} must have the shape of the positions {list(shape)} of the student's "
            f"tensor {list(student.shape)}."
        )
    return mask.to(student.device) != 0


def working_dtype(student: Tensor, teacher: Tensor) -> torch.dtype:
    """Return float64 when both sides have it, else float32: half precision gives stair-like and negative losses."""
    both_double = student.dtype == teacher.dtype == torch.float64
    return torch.float64 if both_double else torch.float32


def full_precision(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which autocast is off for the device."""
    if torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type):
        return torch.autocast(device_type=device.type, enabled=False)
    return nullcontext()


def require(fulfilled: Callable[[Any], bool], loss: str, argument: str, value: Any, meaning: str) -> None:
    """Raise :class:`LossError` unless a hyperparameter has a sensible value."""
    try:
        accepted = fulfilled(value)
    except (TypeError, ValueError, OverflowError):
        accepted = False
    if not accepted:
        raise LossError(f"{loss}: {argument}={value!r} cannot be used; {argument} must be {meaning}.")


def require_positive(loss: str, **arguments: Any) -> None:
    """Require finite numbers above 0."""
    for argument, value in arguments.items():
        require(lambda number: 0 < number < math.inf, loss, argument, value, "a finite number above 0")


def require_weights(loss: str, **arguments: Any) -> None:
    """Require finite numbers that are not negative."""
    for argument, value in arguments.items():
        require(lambda number: 0 <= number < math.inf, loss, argument, value, "a finite number, 0 or more")


def require_count(loss: str, **arguments: Any) -> None:
    """Require whole numbers that are not negative."""
    for argument, value in arguments.items():
        require(lambda number: number == int(number) >= 0, loss, argument, value, "a whole number, 0 or more")


@cache
def _warn_of_padding(loss: str, student_size: int, teacher_size: int) -> None:
    # Cached: once for each pair of sizes, not once for each step.
    logger.warning(
        "%s: the student has %d logits and the teacher %d; the first %d are compared and renormalised, the others are "
        "taken for padding of the vocabulary.",
        loss,
        student_size,
        teacher_size,
        min(student_size, teacher_size),
    )


def _shape_advice(student: Tensor, teacher: Tensor) -> str:
    if student.shape[:-1] == teacher.shape[:-1]:
        return "The widths differ: give the alignment an output projector, for example with auto_projector=True."
    return "Both models must see the same batch, and the alignment must take the same kind of output from both."

"""A user's own function as a loss."""

import functools
import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn

from silverspoon_kd.errors import LossError
from silverspoon_kd.losses.base import Loss, LossSum, Positions
from silverspoon_kd.losses.inputs import (
    check_shapes,
    check_vocabularies,
    full_precision,
    require,
    valid_positions,
    working_dtype,
)


def signature_of(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function, of a module's forward, or None where Python knows none."""
    if isinstance(function, functools.partial) and isinstance(function.func, nn.Module):
        function = functools.partial(function.func.forward, *function.args, **function.keywords)
    try:
        return inspect.signature(function.forward if isinstance(function, nn.Module) else function)
    except (TypeError, ValueError):
        return None


@final
@dataclass(frozen=True)
class CallableLoss(Loss):
    """A function ``(student, teacher) -> scalar`` as a loss: the mean over the positions it is given.

    The student comes first, the teacher second and detached, both in float32 (float64 when both are) with autocast
    off. A function with a parameter named ``mask`` gets whole tensors ``[*positions, features]``, zeros at masked-out
    positions, and ``mask=`` a bool tensor ``[*positions]``. A function without it gets only the positions that count,
    as ``[n, features]``, or the tensors in their own shape when there is no mask. Choosing positions waits for the
    device; ``mask`` avoids that.

    ``total`` is n times the function's result and ``count`` is n, so parts of a batch are averaged by their size.

    Args:
        function: the loss; hyperparameters can be bound with ``functools.partial``, or by ``get_loss_function``.
        positions: ``"targets"`` for a loss on logits. Vocabularies that differ by padding are then cut to what they
            share.
    """

    name: ClassVar[str] = "callable"

    function: Callable[..., Any]
    positions: Positions = "tokens"  # type: ignore[misc]  # the one loss whose users know, not the class

    def __post_init__(self) -> None:
        choices = ("tokens", "targets")
        require(lambda value: value in choices, self.label, "positions", self.positions, "'tokens' or 'targets'")
        _check_function(self.label, self.function)

    @property
    def label(self) -> str:
        """The function's name, for messages."""
        function = self.function
        while isinstance(function, functools.partial):
            function = function.func
        return getattr(function, "__name__", type(function).__name__)

    def sum_and_count(self, student: Tensor, teacher: Tensor, mask: Tensor | None = None) -> LossSum:
        """See :meth:`Loss.sum_and_count`.

        Raises:
            LossError: also when the function's result is no differentiable scalar.
        """
        student, teacher = self._comparable(student, teacher)
        valid = valid_positions(self.label, student, mask)
        with full_precision(student.device):
            if self._takes_mask():
                return self._of_whole(student, teacher, valid)
            if mask is None:
                value = self._checked(self.function(student, teacher), student)
                count = value.new_full((), math.prod(valid.shape))
                return LossSum(value * count, count)
            return self._of_selection(student[valid], teacher[valid])

    def _comparable(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        if self.positions == "targets":
            shared = check_vocabularies(self.label, student, teacher)
            student, teacher = student[..., :shared], teacher[..., :shared]
        check_shapes(self.label, student, teacher)
        dtype = working_dtype(student, teacher)
        return student.to(dtype), teacher.detach().to(dtype)

    def _takes_mask(self) -> bool:
        signature = signature_of(self.function)
        return signature is not None and "mask" in signature.parameters

    def _of_whole(self, student: Tensor, teacher: Tensor, valid: Tensor) -> LossSum:
        keep, zero = valid.unsqueeze(-1), student.new_zeros(())
        student, teacher = student.where(keep, zero), teacher.where(keep, zero)
        value = self._checked(self.function(student, teacher, mask=valid), student)
        count = valid.sum().to(value.dtype)
        # With no valid position the function may divide by 0; its gradient then ends at the `where` on the student.
        return LossSum((value * count).where(count > 0, value.new_zeros(())), count)

    def _of_selection(self, student: Tensor, teacher: Tensor) -> LossSum:
        num_valid = student.shape[0]
        if num_valid == 0:
            total = student.sum()  # of nothing: 0 with zero gradients, where a mean would be NaN
            return LossSum(total, torch.zeros_like(total, requires_grad=False))
        value = self._checked(self.function(student, teacher), student)
        count = value.new_full((), num_valid)
        return LossSum(value * count, count)

    def _checked(self, value: Any, student: Tensor) -> Tensor:
        if not isinstance(value, Tensor):
            came_back = f"a {type(value).__name__}"
        elif value.numel() != 1:
            came_back = f"a tensor of shape {list(value.shape)}; reduce it to its mean over the positions"
        elif student.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
            came_back = "a tensor without a gradient; compute it from the student's tensor with torch functions"
        else:
            return value.reshape(()).to(student.dtype)
        raise LossError(
            f"The loss function {self.label!r} must return a scalar tensor that depends on the student, but returned "
            f"{came_back}."
        )


def _check_function(label: str, function: Any) -> None:
    if isinstance(function, type) or not callable(function):
        what = (
            f"the class {function.__name__}; pass an instance of it" if isinstance(function, type) else repr(function)
        )
        raise LossError(f"A loss must be a function (student, teacher) -> scalar, not {what}.")
    signature = signature_of(function)
    if signature is None:
        return
    mask = {"mask": None} if "mask" in signature.parameters else {}
    try:
        signature.bind(None, None, **mask)
    except TypeError as error:
        raise LossError(
            f"The loss function {label}{signature} cannot be called as (student, teacher): {error}. The student's "
            "tensor is its first argument and the teacher's its second; bind all others with loss keyword arguments."
        ) from None

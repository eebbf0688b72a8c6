"""The replicated teacher: every rank runs its own copy, in its own process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of
from silverspoon_kd.teacher.executor import TeacherExecutor, TeacherRun, check_ids
from silverspoon_kd.teacher.hygiene import adapters_off, freeze_teacher, place_replicated, shares_base


class InlineRun(TeacherRun):
    """A finished forward."""

    def __init__(self, values: dict[Tap, Tensor]) -> None:
        self._values = values

    def take(self, tap: Tap) -> Tensor:
        return self._values[tap]

    def close(self) -> None:
        self._values = {}


class InlineExecutor(TeacherExecutor):
    """Run the teacher where it is called.

    Args:
        teacher: frozen.
        taps: the activations that will be taken.
        trace: what is known of the teacher's forward.
        prepare: maps the batch to the teacher's; None: the batch itself.
        autocast: the dtype of mixed precision, None without.
        around: a context for each forward, such as a PEFT student with its adapters off.
    """

    def __init__(
        self,
        teacher: nn.Module,
        taps: Sequence[Tap],
        trace: Trace,
        *,
        prepare: Callable[[Any], Mapping[str, Any]] | None = None,
        autocast: torch.dtype | None = None,
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.teacher = teacher
        self.view = InputView(teacher, "teacher")
        self._taps, self._trace, self._prepare = taps, trace, prepare
        self._vocab_size = getattr(getattr(base_of(teacher), "config", None), "vocab_size", None)
        self._autocast, self._around = autocast, around

    def start(self, batch: Mapping[str, Any]) -> TeacherRun:
        inputs = self.view(self._prepare(dict(batch)) if self._prepare else batch)
        check_ids(inputs, self._vocab_size)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._around())
            if self._autocast is not None:
                device = next((t.device.type for t in inputs.values() if isinstance(t, Tensor)), "cpu")
                stack.enter_context(torch.autocast(device, dtype=self._autocast))
            if self.teacher.training:
                self.teacher.eval()
            capture = Capture(self.teacher, self._taps, self._trace)
            capture.run(lambda: self.teacher(**inputs), may_stop=True)
        return InlineRun({tap: value.detach() for tap, value in capture.values.items()})

    def close(self) -> None:
        self._prepare = None


def place_teacher(
    teacher: nn.Module,
    student: nn.Module,
    taps: Sequence[Tap],
    trace: Trace,
    *,
    device: torch.device,
    prepare: Callable[[Any], Mapping[str, Any]] | None,
    autocast: torch.dtype | None,
) -> TeacherExecutor:
    """Freeze the teacher and put it beside the student: on its device, or as the PEFT student with its adapters off."""
    if shares_base(student, teacher):
        around = partial(adapters_off, student)
        return InlineExecutor(student, taps, trace, prepare=prepare, autocast=autocast, around=around)
    freeze_teacher(teacher)
    placed = place_replicated(teacher, device)
    return InlineExecutor(placed, taps, trace, prepare=prepare, autocast=autocast)

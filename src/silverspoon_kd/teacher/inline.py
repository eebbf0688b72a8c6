"""The replicated teacher: every rank runs its own copy, in its own process."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of, wrap_units
from silverspoon_kd.distributed.plan import DeviceMemory
from silverspoon_kd.errors import PlacementError
from silverspoon_kd.teacher.executor import PreparedTeacher, TeacherExecutor, TeacherRun, check_ids
from silverspoon_kd.teacher.facts import facts_of, taps_in_effect
from silverspoon_kd.teacher.hygiene import adapters_off, freeze_teacher, is_self_placed, place_replicated, shares_base
from silverspoon_kd.teacher.memory import forward_bytes, sharded_bytes, weight_bytes
from silverspoon_kd.teacher.sharding import free_gathered, shard_frozen
from silverspoon_kd.tree import tensors_in

# Where the memory of a teacher beside the student is: on the device of each student rank.
EACH_RANK = "each rank"


class InlineRun(TeacherRun):
    """A finished forward, or one that is under way on a stream of its own.

    Args:
        values: what was recorded.
        done: comes after the forward on its stream; None: it is finished.
    """

    def __init__(self, values: dict[Tap, Tensor], done: torch.Event | None = None) -> None:
        self._values, self._done = values, done

    def take(self, tap: Tap) -> Tensor:
        value = self._values[tap]
        if self._done is not None and value.device.type != "cpu":
            stream = torch.accelerator.current_stream(value.device)
            stream.wait_event(self._done)
            value.record_stream(stream)
        return value

    def costs(self) -> Mapping[str, float]:
        return {}

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
        stream: where the forwards run; None: on the student's.
    """

    def __init__(
        self,
        teacher: nn.Module,
        taps: Sequence[Tap],
        trace: Trace,
        *,
        stream: torch.Stream | None = None,
        prepare: Callable[[Any], Mapping[str, Any]] | None = None,
        autocast: torch.dtype | None = None,
        around: Callable[[], AbstractContextManager] = nullcontext,
    ) -> None:
        self.teacher = teacher
        self.view = InputView(teacher, "teacher")
        self._taps, self._trace, self._prepare = taps, trace, prepare
        self._vocab_size = getattr(getattr(base_of(teacher), "config", None), "vocab_size", None)
        self._autocast, self._around, self._stream = autocast, around, stream

    def start(self, batch: Mapping[str, Any]) -> TeacherRun:
        inputs = self.view(self._prepare(dict(batch)) if self._prepare else batch)
        check_ids(inputs, self._vocab_size)
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(self._around())
            stack.callback(free_gathered, self.teacher)
            if self._stream is not None:
                self._move_to(self._stream, inputs, stack)
            if self._autocast is not None:
                device = next((t.device.type for t in inputs.values() if isinstance(t, Tensor)), "cpu")
                stack.enter_context(torch.autocast(device, dtype=self._autocast))
            if self.teacher.training:
                self.teacher.eval()
            capture = Capture(self.teacher, self._taps, self._trace)
            capture.run(lambda: self.teacher(**inputs), may_stop=True)
            done = None if self._stream is None else self._stream.record_event()
        return InlineRun({tap: value.detach() for tap, value in capture.values.items()}, done)

    def leave(self, error: Exception) -> NoReturn:
        raise error

    def close(self) -> None:
        self._prepare = None

    def _move_to(self, stream: torch.Stream, inputs: Mapping[str, Any], stack: ExitStack) -> None:
        """Run what follows on ``stream``, after what has been started on the present one."""
        stream.wait_stream(torch.accelerator.current_stream(stream.device))
        stack.enter_context(stream)
        for tensor in tensors_in(inputs):
            if tensor.device == stream.device:
                tensor.record_stream(stream)


class TeacherBesideStudent(PreparedTeacher):
    """A teacher in the student's own process: a copy on each rank, or a share of each weight ("sharded").

    Args:
        teacher: the teacher.
        student: the student.
        taps: the activations that will be taken.
        inputs: a tiny batch as the teacher's forward takes it.
        example: a batch of one row as it comes to the teacher, None where there is none.
        rows: of a batch of the run.
        device: of the student.
        sharded: spread the weights over all ranks.
        overlap: on an accelerator its forwards run on a stream of their own.
        prepare: maps the batch to the teacher's; None: the batch itself.
        autocast: the dtype of mixed precision, None without.
        without_logits: as for :func:`~silverspoon_kd.teacher.facts.facts_of`.

    Raises:
        PlacementError: a PEFT student's own base model cannot be sharded apart from the student.
    """

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        taps: Sequence[Tap],
        inputs: Mapping[str, Any],
        *,
        example: Mapping[str, Any] | None,
        rows: int,
        device: torch.device,
        sharded: bool,
        overlap: bool,
        prepare: Callable[[Any], Mapping[str, Any]] | None,
        autocast: torch.dtype | None,
        without_logits: str | None = None,
    ) -> None:
        self._own_base = shares_base(student, teacher)
        if self._own_base and sharded:
            raise PlacementError(
                "teacher_placement='sharded' cannot shard the student's own base model. Use teacher_placement=None, or "
                "load the teacher separately."
            )
        self._teacher, self._student = teacher, student
        self._device, self._sharded, self._trace = device, sharded, Trace()
        self._prepare, self._autocast, self._overlap = prepare, autocast, overlap
        facts = facts_of(teacher, taps, self._trace, inputs, without_logits=without_logits)
        self._taps = taps_in_effect(taps, facts.head_form)
        self.facts = replace(facts, memory=(self._memory(example, rows),))

    def place(self) -> TeacherExecutor:
        model, around = self._student, partial(adapters_off, self._student)
        if not self._own_base:
            freeze_teacher(self._teacher)
            model, around = self._placed(), nullcontext  # type: ignore[assignment]
        stream = torch.Stream(self._device) if self._overlap and self._device.type != "cpu" else None
        return InlineExecutor(
            model, self._taps, self._trace, prepare=self._prepare, autocast=self._autocast, around=around, stream=stream
        )

    def abandon(self) -> None:
        """Nothing has been changed."""

    def _placed(self) -> nn.Module:
        if self._sharded:
            mesh = init_device_mesh(self._device.type, (dist.get_world_size(),))
            return shard_frozen(self._teacher, mesh, self._device)
        return place_replicated(self._teacher, self._device)

    def _memory(self, example: Mapping[str, Any] | None, rows: int) -> DeviceMemory:
        device = str(self._device)
        places = None if is_self_placed(self._teacher) else {"": device}
        weights, gathered = weight_bytes(self._teacher, places).get(device, 0), 0
        if self._sharded:
            weights, gathered = sharded_bytes(self._teacher, wrap_units(self._teacher, None), dist.get_world_size())
        found, forward, signals = None, None, None
        if example is not None:
            found = forward_bytes(self._teacher, self._taps, self._trace, example, rows, places, self._autocast)
        if found is not None:
            signals = found.signals.get(device, 0)
            forward = found.peak.get(device, 0) - signals
        parts = {"weights": 0 if self._own_base else weights, "gathered": gathered, "forward": forward}
        return DeviceMemory(EACH_RANK, (*parts.items(), ("signals", signals)))

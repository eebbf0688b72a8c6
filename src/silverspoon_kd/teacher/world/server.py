"""A teacher process at work: one forward for each request, each activation sent as soon as it exists."""

import json
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of
from silverspoon_kd.capture.probe import example_inputs
from silverspoon_kd.errors import DataError, PlacementError
from silverspoon_kd.teacher.facts import facts_of
from silverspoon_kd.teacher.sharding import free_gathered
from silverspoon_kd.teacher.world.codec import decode
from silverspoon_kd.teacher.world.link import Link, Message, dtype_name
from silverspoon_kd.teacher.world.needs import WorldMemory
from silverspoon_kd.teacher.world.reports import Report, ReportedError, report_of
from silverspoon_kd.teacher.world.spec import WorldSpec
from silverspoon_kd.teacher.world.strategies import build_teacher
from silverspoon_kd.tree import map_tensors, shapes, tensors_in

# A student may be busy for as long as it likes: saving, evaluating, or stopped in a debugger.
_FOREVER = timedelta(days=365)


class Server:
    """One process of a teacher world.

    Args:
        spec: of the world.
        rank: of this process in the world.
        store: shared with the students of this node.
    """

    def __init__(self, spec: WorldSpec, rank: int, store: Store) -> None:
        self._spec, self._rank, self._store = spec, rank, store
        self._size = spec.num_processes
        if self._size > 1:
            backend = "gloo" if spec.device_type == "cpu" else None
            world = PrefixStore("silverspoon_kd/world", store)
            timeout = timedelta(seconds=spec.load_timeout)
            dist.init_process_group(backend, store=world, rank=rank, world_size=self._size, timeout=timeout)
            self._requests = dist.new_group(backend="gloo", timeout=_FOREVER)
        self._trace = Trace()
        self._taps = list(spec.taps)

    def run(self) -> None:
        """Load the teacher, tell the students about it, and serve."""
        facts: dict[str, Any] = {}
        self._teacher = build_teacher(self._spec, self._rank, self._describe(facts))
        self._view = InputView(self._teacher, "teacher")
        if self._spec.strategy == "tp" and self._size > 1:
            self._check_whole()
        if self._rank == 0:
            facts["memory"] = self._memory.told(self._teacher)
            self._store.set("hello", json.dumps(facts))
        students = self._spec.num_students
        limit = self._spec.load_timeout
        self._link = Link(self._store, students + self._rank, students + self._size, limit, None)
        while True:
            self._serve(self._next())

    def _describe(self, facts: dict[str, Any]) -> Any:
        """Return what looks at the teacher before it is spread: the shapes of its activations, on fake tensors."""

        def describe(teacher: nn.Module) -> None:
            inputs = example_inputs(teacher)
            if inputs is None and self._spec.example is not None:
                inputs = InputView(teacher, "teacher")(self._spec.example)
            if inputs is None:
                raise DataError(
                    f"The shapes of the teacher {type(base_of(teacher)).__name__} cannot be found without data. Pass a "
                    "train_dataset or an eval_dataset."
                )
            found = facts_of(teacher, self._taps, self._trace, inputs)
            self._example, self._whole = inputs, {tap: value.shape for tap, value in found.values.items()}
            facts["values"] = [
                [dtype_name(found.values[tap].dtype), list(found.values[tap].shape)] for tap in self._taps
            ]
            facts.update(columns=found.columns, vocab_size=found.vocab_size, shifts_labels=found.shifts_labels)
            facts["class"] = found.class_name
            self._memory = WorldMemory(teacher, self._spec, self._rank, self._taps, self._trace)

        return describe

    def _check_whole(self) -> None:
        """Refuse activations of which a tensor-parallel process has only a part.

        Raises:
            PlacementError: there is one.
        """
        device = next(self._teacher.parameters()).device
        capture = Capture(self._teacher, self._taps, Trace())
        inputs = map_tensors(lambda tensor: tensor.to(device), self._example)
        with torch.no_grad():
            capture.run(lambda: self._teacher(**self._view(inputs)), may_stop=False)
        for tap, value in capture.values.items():
            if value.shape != self._whole[tap]:
                raise PlacementError(
                    f"strategy='tp' splits the {tap.side} of {tap.module!r}: a process has {list(value.shape)} of "
                    f"{list(self._whole[tap])}. Align a module around it, or use strategy='pp' or 'sharded'."
                )

    def _next(self) -> Message:
        """Return the next request; with several processes the first receives it and hands it on."""
        if self._size == 1:
            return self._link.receive()
        box: list[Any] = [None]
        if self._rank == 0:
            message = self._link.receive()
            box = [(message.content, message.tensors, message.source)]
        dist.broadcast_object_list(box, src=0, group=self._requests)
        return Message(*box[0])

    def _serve(self, message: Message) -> None:
        inputs = decode(message.content["inputs"], message.tensors)
        run = _Answer(self._link, message.source, message.content["id"], self._taps)
        try:
            rows = self._divide(inputs)
            run.keep = rows.keep
            self._forward(rows.inputs, run)
        except Exception as error:
            where = f"(In the teacher's forward; its batch was {shapes(inputs) or 'without tensors'}.)"
            report = report_of(error, where, alone=self._size == 1)
            if self._size > 1:
                # The other processes wait in a collective of this forward: the world cannot go on.
                raise ReportedError(report) from error
            run.fail(report)
        run.close()

    def _forward(self, inputs: dict[str, Any], run: "_Answer") -> None:
        device = next(self._teacher.parameters()).device
        if device.type != "meta":
            inputs = map_tensors(lambda tensor: tensor.to(device), inputs)
        dtype = self._spec.autocast
        mixed = torch.autocast(self._spec.device_type, dtype=dtype) if dtype is not None else nullcontext()
        answers = self._spec.strategy != "tp" or self._rank == 0
        capture = Capture(self._teacher, self._taps, self._trace, on_value=run.send if answers else None)
        with torch.no_grad(), mixed:
            capture.run(lambda: self._teacher(**self._view(inputs)), may_stop=True)
        if answers:
            for tap in self._taps:
                run.send(tap, capture.values[tap])
        free_gathered(self._teacher)

    def _divide(self, inputs: dict[str, Any]) -> "_Rows":
        """Return this process's rows; every process runs a forward, if need be on a row that is not its own."""
        if self._spec.strategy != "sharded" or self._size == 1:
            return _Rows(inputs, None)
        total = max((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), default=0)
        share = -(-total // self._size)
        first = min(self._rank * share, total - 1)
        last = max(min((self._rank + 1) * share, total), first + 1)
        own = max(0, min((self._rank + 1) * share, total) - self._rank * share)

        def cut(tensor: Tensor) -> Tensor:
            return tensor[first:last] if tensor.dim() and len(tensor) == total else tensor

        return _Rows(map_tensors(cut, inputs), own)


class _Rows:
    """The inputs of one process, and how many rows of its outputs are wanted (None: all)."""

    def __init__(self, inputs: dict[str, Any], keep: int | None) -> None:
        self.inputs, self.keep = inputs, keep


class _Answer:
    """The activations of one request on their way back."""

    def __init__(self, link: Link, to: int, number: int, taps: list[Tap]) -> None:
        self._link, self._to, self._number = link, to, number
        self._index = {tap: index for index, tap in enumerate(taps)}
        self._sent: dict[Tap, Tensor] = {}
        self.keep: int | None = None

    def send(self, tap: Tap, value: Tensor) -> None:
        """Send one activation once; the same tensor under a second name is only named."""
        if tap in self._sent or self.keep == 0:
            return
        content = {"id": self._number, "tap": self._index[tap]}
        same = next((other for other, tensor in self._sent.items() if tensor is value), None)
        self._sent[tap] = value
        if same is not None:
            self._link.send(self._to, {**content, "same_as": self._index[same]})
        else:
            self._link.send(self._to, content, [value if self.keep is None else value[: self.keep]])

    def fail(self, report: Report) -> None:
        """Send an error in place of what is still missing."""
        self._link.send(self._to, {"id": self._number, "error": report})

    def close(self) -> None:
        """Forget the activations."""
        self._sent.clear()

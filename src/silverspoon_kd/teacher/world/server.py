"""A teacher process at work: one forward for each request, each activation sent as soon as it exists."""

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore, Store

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of
from silverspoon_kd.capture.head_form import HeadForm
from silverspoon_kd.capture.probe import example_inputs
from silverspoon_kd.errors import DataError, PlacementError
from silverspoon_kd.host_memory import keep_freed_memory
from silverspoon_kd.teacher.facts import divides_by_rows, facts_of, taps_in_effect
from silverspoon_kd.teacher.sharding import free_gathered
from silverspoon_kd.teacher.world.codec import decode
from silverspoon_kd.teacher.world.link import Link, Message, dtype_name
from silverspoon_kd.teacher.world.needs import WorldMemory
from silverspoon_kd.teacher.world.parts import num_parts, part_of
from silverspoon_kd.teacher.world.reports import Report, ReportedError, report_of
from silverspoon_kd.teacher.world.shared_head import SharedHead
from silverspoon_kd.teacher.world.spec import WorldSpec
from silverspoon_kd.teacher.world.strategies import build_teacher
from silverspoon_kd.tree import map_tensors, shapes

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
        self._head: SharedHead | None = None

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
        pinned = self._spec.device_type != "cpu"
        self._link = Link(self._store, students + self._rank, students + self._size, limit, None, pinned=pinned)
        if self._head is not None:
            self._head.close()
        if self._spec.device_type == "cpu":
            keep_freed_memory()
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
            wish = self._spec.without_logits
            found = facts_of(teacher, self._taps, self._trace, inputs, without_logits=wish)
            self._taps = taps_in_effect(self._taps, found.head_form)
            fused = isinstance(found.head_form, HeadForm)
            facts["head_form"] = asdict(found.head_form) if isinstance(found.head_form, HeadForm) else found.head_form
            self._example, self._whole = inputs, {tap: value.shape for tap, value in found.values.items()}
            facts["values"] = [
                [dtype_name(found.values[tap].dtype), list(found.values[tap].shape)] for tap in self._taps
            ]
            facts.update(columns=found.columns, vocab_size=found.vocab_size, shifts_labels=found.shifts_labels)
            facts["class"], facts["main_input"] = found.class_name, found.main_input
            self._num_parts = 1
            if self._spec.num_parts > 1 and divides_by_rows(teacher, found, inputs):
                self._num_parts = self._spec.num_parts
            facts["divides"], self._main_input = self._num_parts > 1, found.main_input
            # Students that gave the teacher as a module have its head.
            given = isinstance(self._spec.source, nn.Module)
            if (self._spec.shares_head or fused) and not given and self._rank == 0:
                self._head = SharedHead(teacher)
            facts["head"] = None if self._head is None else self._head.description
            self._memory = WorldMemory(teacher, self._spec, self._rank, self._taps, self._trace, self._num_parts)

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
            # Each would be sent with the whole buffer that it is a view of.
            tensors = [tensor.clone() for tensor in message.tensors]
            box = [(message.content, tensors, message.source)]
        dist.broadcast_object_list(box, src=0, group=self._requests)
        return Message(*box[0])

    def _serve(self, message: Message) -> None:
        inputs = decode(message.content["inputs"], message.tensors)

        def report(error: Exception) -> Report:
            where = f"(In the teacher's forward; its batch was {shapes(inputs) or 'without tensors'}.)"
            return report_of(error, where, alone=self._size == 1)

        reply = _Reply(self._link, message.source, message.content["id"], self._taps, report)
        try:
            self._forward(inputs, reply)
        except Exception as error:
            if self._size > 1:
                # The other processes wait in a collective of this forward: the world cannot go on.
                raise ReportedError(report(error)) from error
            reply.fail(error)

    def _forward(self, inputs: dict[str, Any], reply: "_Reply") -> None:
        """Run the parts of the batch that are this process's, one after the other.

        Nothing waits for a device in between, so the devices of a pipeline work on different parts at the same time.
        """
        device = next(self._teacher.parameters()).device
        if device.type != "meta":
            # From pinned memory an accelerator copies without being waited for.
            inputs = map_tensors(lambda tensor: tensor.to(device, non_blocking=True), inputs)
        parts = num_parts(inputs, self._main_input, self._num_parts)
        pipelined, dtype = self._spec.strategy == "pp", self._spec.autocast
        for number in range(parts) if pipelined else [self._rank]:
            # Every process runs a forward, if need be on rows that are not its own.
            inside = number < parts
            part = part_of(inputs, self._main_input, number if inside else 0, parts)
            send = partial(reply.send, part=number, parts=parts) if pipelined else partial(reply.send, part=0, parts=1)
            capture = Capture(self._teacher, self._taps, self._trace, on_value=send if inside else None)
            mixed = torch.autocast(self._spec.device_type, dtype=dtype) if dtype is not None else nullcontext()
            with torch.no_grad(), mixed:
                capture.run(partial(self._teacher, **self._view(part)), may_stop=True)
            for tap in self._taps if inside else ():
                send(tap, capture.values[tap])
        free_gathered(self._teacher)


class _Reply:
    """The activations of one request on their way back."""

    def __init__(
        self, link: Link, to: int, number: int, taps: list[Tap], report: Callable[[Exception], Report]
    ) -> None:
        self._link, self._to, self._number = link, to, number
        self._index = {tap: index for index, tap in enumerate(taps)}
        self._part, self._sent = 0, dict[Tap, Tensor]()

        def error_message(error: Exception) -> dict[str, Any]:
            return {"id": number, "error": report(error)}

        self._error_message = error_message

    def send(self, tap: Tap, value: Tensor, *, part: int, parts: int) -> None:
        """Send a part of an activation once; the same tensor under a second name is only named."""
        if part != self._part:
            self._part, self._sent = part, {}
        if tap in self._sent:
            return
        content = {"id": self._number, "tap": self._index[tap], "part": part, "parts": parts}
        same = next((other for other, tensor in self._sent.items() if tensor is value), None)
        self._sent[tap] = value
        if same is not None:
            self._link.send(self._to, {**content, "same_as": self._index[same]})
        else:
            self._link.send(self._to, content, [value], failed=self._error_message)

    def fail(self, error: Exception) -> None:
        """Send an error in place of what is still missing."""
        self._link.send(self._to, self._error_message(error))

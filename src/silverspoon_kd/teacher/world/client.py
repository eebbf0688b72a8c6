"""The student's side of a teacher world: requests go out at once, activations come in when they are taken."""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from silverspoon_kd.capture import LABEL_KEYS, Tap
from silverspoon_kd.ending import let_threads_finish
from silverspoon_kd.teacher.executor import TeacherExecutor, TeacherRun, check_ids
from silverspoon_kd.teacher.facts import TeacherFacts
from silverspoon_kd.teacher.world.codec import encode
from silverspoon_kd.teacher.world.inbox import Answers, Inbox
from silverspoon_kd.teacher.world.launch import World
from silverspoon_kd.teacher.world.link import Link
from silverspoon_kd.teacher.world.parts import num_parts


class WorldRun(TeacherRun):
    """One request; its activations arrive in the teacher's order, each in parts of the batch.

    Args:
        world: that works on it.
        index: number of each activation.
        sources: the processes that answer, in the order of their rows.
        answers: what arrives.
        device: where activations are taken to.
    """

    def __init__(
        self, world: World, index: Mapping[Tap, int], sources: Sequence[int], answers: Answers, device: torch.device
    ) -> None:
        self._world, self._index, self._sources, self._answers = world, index, sources, answers
        self._device = device
        # By activation: the parts by process and number. The number of parts by process, once it is known.
        self._parts: dict[int, dict[tuple[int, int], Tensor]] = {}
        self._num_parts: dict[int, int] = {}
        self._whole: dict[tuple[int, ...], Tensor] = {}
        self._waited, self._received, self._crossing = 0.0, 0, 0.0

    def take(self, tap: Tap) -> Tensor:
        index = self._index[tap]
        while (parts := self._parts_of(index)) is None:
            self._accept()
        # Two names of the same tensor have the same parts.
        same = tuple(map(id, parts))
        if same not in self._whole:
            # From pinned memory a device copies without being waited for; pageable memory is staged by it.
            # "cpu:0", the device of torchrun's ranks, would be a copy.
            there = self._device.type == "cpu"
            moved = parts if there else [part.to(self._device, non_blocking=True) for part in parts]
            self._whole[same] = moved[0] if len(moved) == 1 else torch.cat(moved)
        return self._whole[same]

    def costs(self) -> Mapping[str, float]:
        return {"teacher_wait": self._waited, "teacher_bytes": self._received, "teacher_link": self._crossing}

    def close(self) -> None:
        self._parts, self._whole = {}, {}

    def _parts_of(self, index: int) -> list[Tensor] | None:
        """Return all parts of an activation, in the order of the rows; None while some are missing."""
        if len(self._num_parts) < len(self._sources):
            return None
        keys = [(source, part) for source in self._sources for part in range(self._num_parts[source])]
        there = self._parts.get(index, {})
        return [there[key] for key in keys] if all(key in there for key in keys) else None

    def _accept(self) -> None:
        """Wait for the next message and put it where it belongs."""
        start = time.perf_counter()
        with self._world.watching():
            message = self._answers.get()
            if isinstance(message, Exception):
                raise message
        self._waited += time.perf_counter() - start
        content = message.content
        if "error" in content:
            self._world.fail(content["error"])
        self._received += sum(tensor.nbytes for tensor in message.tensors)
        self._crossing += message.seconds
        self._num_parts[message.source] = content["parts"]
        key = message.source, content["part"]
        value = self._parts[content["same_as"]][key] if "same_as" in content else message.tensors[0]
        self._parts.setdefault(content["tap"], {})[key] = value


class WorldExecutor(TeacherExecutor):
    """Ask the node's teacher world.

    Args:
        world: started, or joined, on this node.
        taps: the activations that will be taken, as the world knows them.
        prepare: maps the batch to the teacher's; None: the batch itself.
        facts: what the world said of the teacher.
        device: where activations are taken to.
    """

    def __init__(
        self,
        world: World,
        taps: Sequence[Tap],
        *,
        prepare: Callable[[Any], Mapping[str, Any]] | None,
        facts: TeacherFacts,
        device: torch.device,
    ) -> None:
        self._index = {tap: index for index, tap in enumerate(taps)}
        self._world, self._prepare, self._facts, self._device = world, prepare, facts, device
        self._link: Link = world.connect(pinned=device.type != "cpu")
        self._inbox = Inbox(self._link, len(taps))
        self._number = 0
        # Also at the end of the process, which is the only end that most scripts give it.
        self._end = weakref.finalize(self, _end, world, self._link, self._inbox)

    def start(self, batch: Mapping[str, Any]) -> TeacherRun:
        inputs = self._prepare(dict(batch)) if self._prepare else batch
        columns, needed = self._facts.columns, ("labels",) if self._facts.shifts_labels else ()
        inputs = {
            key: value
            for key, value in inputs.items()
            if (key not in LABEL_KEYS or key in needed) and (columns is None or key in columns)
        }
        check_ids(inputs, self._facts.vocab_size)
        self._number += 1
        parts = num_parts(inputs, self._facts.main_input, self._world.num_answering) if self._facts.divides else 1
        sources = [self._world.lead + number for number in range(parts)]
        tensors: list[Tensor] = []
        form = encode(inputs, tensors)
        with self._world.watching():
            self._link.send(self._world.lead, {"id": self._number, "inputs": form}, tensors)
        return WorldRun(self._world, self._index, sources, self._inbox.expect(self._number, sources), self._device)

    def leave(self, error: Exception) -> NoReturn:
        self._world.leave(error)

    def close(self) -> None:
        self._end()


def _end(world: World, link: Link, inbox: Inbox) -> None:
    world.close()
    inbox.close()
    link.close()
    let_threads_finish()

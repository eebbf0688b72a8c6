"""The student's side of a teacher world: requests go out at once, activations come in when they are taken."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from silverspoon_kd.capture import LABEL_KEYS, Tap
from silverspoon_kd.teacher.executor import TeacherExecutor, TeacherRun, check_ids
from silverspoon_kd.teacher.facts import TeacherFacts
from silverspoon_kd.teacher.world.codec import encode
from silverspoon_kd.teacher.world.launch import World
from silverspoon_kd.teacher.world.link import Link, interruptible
from silverspoon_kd.tree import tensors_in


class WorldRun(TeacherRun):
    """One request; its activations arrive in the teacher's order."""

    def __init__(self, executor: "WorldExecutor", number: int, sources: Sequence[int]) -> None:
        self._executor, self.number, self._sources = executor, number, sources
        self._parts: dict[int, dict[int, Tensor]] = {}
        self._whole: dict[int, Tensor] = {}

    def take(self, tap: Tap) -> Tensor:
        index = self._executor.index[tap]
        if index not in self._whole:
            parts = [self._part(index, source) for source in self._sources]
            self._whole[index] = parts[0] if len(parts) == 1 else torch.cat(parts)
        return self._whole[index]

    def deliver(self, index: int, source: int, value: Tensor | int) -> None:
        """Put an activation into the mailbox; a number names the one that it equals."""
        parts = self._parts.setdefault(index, {})
        parts[source] = self._parts[value][source] if isinstance(value, int) else value

    def close(self) -> None:
        self._executor.forget(self.number)
        self._parts, self._whole = {}, {}

    def _part(self, index: int, source: int) -> Tensor:
        while source not in self._parts.get(index, {}):
            self._executor.receive(source)
        return self._parts[index][source]


class WorldExecutor(TeacherExecutor):
    """Ask the node's teacher world.

    Args:
        world: started, or joined, on this node.
        taps: the activations that will be taken, as the world knows them.
        prepare: maps the batch to the teacher's; None: the batch itself.
        facts: what the world said of the teacher.
    """

    def __init__(
        self,
        world: World,
        taps: Sequence[Tap],
        *,
        prepare: Callable[[Any], Mapping[str, Any]] | None,
        facts: TeacherFacts,
    ) -> None:
        self.index = {tap: index for index, tap in enumerate(taps)}
        self._world, self._prepare, self._facts = world, prepare, facts
        self._link: Link = world.connect()
        self._runs: dict[int, WorldRun] = {}
        self._number = 0
        # Also at the end of the process, which is the only end that most scripts give it.
        self._end = weakref.finalize(self, world.close)

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
        rows = max((len(tensor) for tensor in tensors_in(inputs) if tensor.dim()), default=0)
        run = WorldRun(self, self._number, self._world.answering(rows))
        self._runs[self._number] = run
        tensors: list[Tensor] = []
        form = encode(inputs, tensors)
        with self._world.watching():
            self._link.send(self._world.lead, {"id": self._number, "inputs": form}, tensors)
        return run

    def receive(self, source: int) -> None:
        """Wait for the next message of a teacher process and put it where it belongs."""
        with self._world.watching():
            message = interruptible(lambda: self._link.receive(source))
        content = message.content
        if "error" in content:
            self._world.fail(content["error"])
        run = self._runs.get(content["id"])
        if run is not None:
            value = content["same_as"] if "same_as" in content else message.tensors[0]
            run.deliver(content["tap"], source, value)

    def forget(self, number: int) -> None:
        """Drop what still arrives for a run."""
        self._runs.pop(number, None)

    def leave(self, error: Exception) -> NoReturn:
        self._world.leave(error)

    def close(self) -> None:
        self._end()

"""A teacher world of one process in a thread of this process: its server, the wire and the student's side are real."""

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from silverspoon_kd.capture import Tap
from silverspoon_kd.teacher.dedicated import DedicatedTeacher
from silverspoon_kd.teacher.world.client import WorldExecutor
from silverspoon_kd.teacher.world.link import Link
from silverspoon_kd.teacher.world.reports import error_of
from silverspoon_kd.teacher.world.server import Server
from silverspoon_kd.teacher.world.spec import WorldSpec

SECONDS = 60


class NearWorld:
    """What the student's side asks of a world."""

    lead, num_answering = 1, 1

    def __init__(self, spec: WorldSpec) -> None:
        self._store = dist.HashStore()
        self.server = Server(spec, 0, self._store)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def facts(self) -> dict[str, Any]:
        self._store.wait(["hello"])
        return json.loads(self._store.get("hello"))

    def connect(self, *, pinned: bool) -> Link:
        self.link = Link(self._store, 0, 2, SECONDS, SECONDS, pinned=pinned)
        return self.link

    def watching(self):
        return nullcontext()

    def fail(self, told=None, cause=None):
        raise error_of(told) if told else cause

    def close(self) -> None:
        self.link.send(1, {"id": None})  # no request: the server fails
        self._thread.join(timeout=10)

    def _serve(self) -> None:
        with suppress(KeyError):  # the end
            self.server.run()


@contextmanager
def near_world(teacher: nn.Module, taps: Sequence[Tap], device: str = "cpu", **changes: Any) -> Iterator[WorldExecutor]:
    """Yield the executor of a "pp" teacher; ``changes`` go to the spec."""
    values = {
        "source": teacher, "taps": tuple(taps), "strategy": "pp", "device_type": "cpu", "devices": (0,), "cores": (),
        "wrap_cls": None, "autocast": None, "num_students": 1, "example": None, "timeout": SECONDS,
        "load_timeout": SECONDS, "search_path": (),
    }  # fmt: skip
    world: Any = NearWorld(WorldSpec(**{**values, **changes}))
    prepared = DedicatedTeacher(world, taps, prepare=None, device=torch.device(device), module=None)
    executor: Any = prepared.place()
    try:
        yield executor
    finally:
        executor.close()

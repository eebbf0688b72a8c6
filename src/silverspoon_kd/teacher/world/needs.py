"""How many bytes each device of a world will need."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from silverspoon_kd.capture import Tap, Trace, wrap_units
from silverspoon_kd.teacher.hygiene import is_self_placed
from silverspoon_kd.teacher.memory import capacity, forward_bytes, sharded_bytes, weight_bytes
from silverspoon_kd.teacher.world.pipeline import pipeline_map
from silverspoon_kd.teacher.world.spec import WorldSpec


class WorldMemory:
    """What the devices of a world will hold, predicted while the teacher is whole.

    Args:
        teacher: frozen, not spread yet.
        spec: of the world.
        rank: of this process in the world.
        taps: activations that will be recorded.
        trace: of an earlier forward.
        num_parts: into how many parts a batch is divided.
    """

    def __init__(
        self, teacher: nn.Module, spec: WorldSpec, rank: int, taps: Sequence[Tap], trace: Trace, num_parts: int
    ) -> None:
        self._spec, self._devices = spec, [f"{spec.device_type}:{index}" for index in spec.devices]
        one = "cpu" if spec.device_type == "cpu" else self._devices[rank if spec.strategy != "pp" else 0]
        self._one = one
        places: Mapping[str, str] | None = {"": one}
        self._num_parts = min(num_parts, spec.rows)
        rows = -(-spec.rows // self._num_parts)
        if spec.strategy == "pp" and is_self_placed(teacher):
            places = None
        elif spec.strategy == "pp" and spec.device_type != "cpu" and len(spec.devices) > 1:
            places = pipeline_map(teacher, self._devices)
        self._gathered = 0
        self._weights = weight_bytes(teacher, places)
        if spec.strategy == "sharded" and spec.num_processes > 1 and not is_self_placed(teacher):
            units = wrap_units(teacher, spec.wrap_cls)
            self._weights[one], self._gathered = sharded_bytes(teacher, units, spec.num_processes)
        given = spec.example is not None
        forward = (
            forward_bytes(teacher, taps, trace, spec.example or {}, rows, places, spec.autocast) if given else None
        )
        self._forward = forward

    def told(self, placed: nn.Module) -> list[list[Any]]:
        """Return the place, the parts and the capacity of each device, as JSON takes them.

        Args:
            placed: the teacher as it was spread, whose shares are read where a model's own plan divides it ("tp").
        """
        if self._spec.strategy == "tp":
            self._weights = weight_bytes(placed)
        if self._spec.strategy != "pp":
            # Every process has as much as this one.
            return [[device, self._parts(self._one), self._capacity(self._one)] for device in self._devices]
        if self._spec.device_type == "cpu":
            return [[" ".join(self._devices), self._parts("cpu"), None]]
        used = {*self._weights, *(self._forward.peak if self._forward else ())}
        devices = self._devices + sorted(used - set(self._devices))
        return [[device, self._parts(device), self._capacity(device)] for device in devices]

    def _parts(self, device: str) -> list[tuple[str, int | None]]:
        forward, signals = None, None
        if self._forward is not None:
            signals = self._forward.signals.get(device, 0)
            forward = self._forward.peak.get(device, 0) - signals
            # The parts of a pipeline follow each other before the first is on its way.
            signals *= self._num_parts if self._spec.strategy == "pp" else 1
        weights = self._weights.get(device, 0)
        return [("weights", weights), ("gathered", self._gathered), ("forward", forward), ("signals", signals)]

    def _capacity(self, device: str) -> int | None:
        return capacity(torch.device(device))

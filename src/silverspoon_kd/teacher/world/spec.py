"""What a teacher process is told when it starts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from silverspoon_kd.capture import Tap


@dataclass(frozen=True)
class WorldSpec:
    """One node's teacher world.

    Attributes:
        source: a model id or folder, a callable that builds the module, or the module itself.
        taps: the activations that students will take.
        strategy: "pp", "tp" or "sharded".
        device_type: of the teacher's devices.
        devices: their logical indices: one for each process with "tp" and "sharded", all for the one process of "pp".
        cores: CPU cores to stay on, by device; empty: no restriction.
        wrap_cls: for "sharded".
        autocast: dtype of mixed precision.
        num_students: student ranks of this node.
        example: a batch of one row, where the model's config says too little and to foresee how much memory is needed.
        timeout: longest wait for an activation, in seconds.
        load_timeout: longest wait for the teacher to be loaded, in seconds.
        search_path: the starting process's ``sys.path``.
        rows: of a batch of the run.
        micro_batches: into how many parts "pp" cuts a request, so that its devices work at the same time.
        shares_head: whether the students want the teacher's output head.
        without_logits: as for :func:`~silverspoon_kd.teacher.facts.facts_of`.
    """

    source: str | Callable[[], nn.Module] | nn.Module
    taps: Sequence[Tap]
    strategy: str
    device_type: str
    devices: tuple[int, ...]
    cores: tuple[tuple[int, ...], ...]
    wrap_cls: str | list[str] | None
    autocast: torch.dtype | None
    num_students: int
    example: dict[str, Any] | None
    timeout: float
    load_timeout: float
    search_path: tuple[str, ...]
    rows: int = 1
    micro_batches: int = 1
    shares_head: bool = False
    without_logits: str | None = None

    @property
    def num_processes(self) -> int:
        """Processes of the world."""
        return 1 if self.strategy == "pp" else len(self.devices)

    @property
    def num_parts(self) -> int:
        """Into how many parts a request is cut where its rows allow it."""
        return {"pp": self.micro_batches, "tp": 1, "sharded": len(self.devices)}[self.strategy]

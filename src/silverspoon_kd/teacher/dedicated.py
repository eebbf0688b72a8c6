"""A teacher on devices of its own: one world of processes for each node, started by the node's first student rank."""

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from silverspoon_kd.capture import Tap
from silverspoon_kd.capture.head_form import HeadForm
from silverspoon_kd.distributed import TeacherPlacement
from silverspoon_kd.distributed.plan import DeviceMemory
from silverspoon_kd.distributed.split_gpu import Split
from silverspoon_kd.errors import PlacementError
from silverspoon_kd.teacher.executor import PreparedTeacher, TeacherExecutor
from silverspoon_kd.teacher.facts import TeacherFacts, taps_in_effect
from silverspoon_kd.teacher.head import Head, head_of
from silverspoon_kd.teacher.world.client import WorldExecutor
from silverspoon_kd.teacher.world.launch import World
from silverspoon_kd.teacher.world.shared_head import open_head
from silverspoon_kd.teacher.world.spec import WorldSpec
from silverspoon_kd.teacher.world.strategies import check_source
from silverspoon_kd.teacher.world.weights import SharedWeights, adopt_weights, places_in, share_weights


def start_world(
    source: nn.Module | str | Callable[[], nn.Module],
    placement: TeacherPlacement,
    split: Split,
    taps: Sequence[Tap],
    *,
    example: Mapping[str, Any] | None,
    rows: int,
    autocast: torch.dtype | None,
    timeouts: tuple[float, float],
    micro_batches: int | None = None,
    wants_head: bool = False,
    without_logits: str | None = None,
) -> World:
    """Start this node's teacher world, or join it.

    A teacher given as a module hands its weights over in memory: they are moved to a file that all processes of the
    node map, and every rank's own copy is freed. With an id or a callable no student rank ever loads the teacher.

    Args:
        source: the teacher.
        placement: the user's wish.
        split: the node's devices.
        taps: the activations that will be taken.
        example: a batch of one row, for teachers whose config does not say what they take in.
        rows: of a batch of the run.
        autocast: dtype of mixed precision.
        timeouts: longest waits for an activation and for the teacher to be loaded, in seconds.
        micro_batches: into how many parts "pp" cuts a request; None: one for each device, on CPU slots one.
        wants_head: the students need the teacher's output head.
        without_logits: as for :func:`~silverspoon_kd.teacher.facts.facts_of`; the head is then shared too.

    Raises:
        PlacementError: the teacher, or a request, cannot be divided so.
    """
    check_source(source, placement.strategy, len(split.teacher_indices))
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    starts = local_rank == 0
    module = source if isinstance(source, nn.Module) else None
    shared = share_weights(module) if starts and module is not None else None
    spec = WorldSpec(
        source=source if starts else "",
        taps=tuple(taps),
        strategy=placement.strategy,
        device_type=split.device_type,
        devices=split.teacher_indices,
        cores=tuple((split.cores[slot],) for slot in split.teacher_ids) if split.cores else (),
        wrap_cls=placement.wrap_cls,
        autocast=autocast,
        num_students=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        example=None if example is None else dict(example),
        timeout=timeouts[0],
        load_timeout=timeouts[1],
        search_path=tuple(sys.path),
        rows=rows,
        micro_batches=_micro_batches(micro_batches, placement, split),
        shares_head=wants_head,
        without_logits=without_logits,
    )
    return _started(spec, module, shared) if starts else _joined(spec, module, local_rank)


def _started(spec: WorldSpec, module: nn.Module | None, shared: SharedWeights | None) -> World:
    world = World(spec, 0, None, shared)
    weights = (shared.path, shared.nbytes, places_in(shared, module)) if shared and module is not None else None
    _from_first_rank((world.port, weights))
    return world


def _joined(spec: WorldSpec, module: nn.Module | None, local_rank: int) -> World:
    port, weights = _from_first_rank(None)
    world = World(spec, local_rank, port, None)
    if weights is not None and module is not None:
        adopt_weights(module, *weights)
    return world


class DedicatedTeacher(PreparedTeacher):
    """A teacher in its own world, loaded and waiting for the students to connect.

    Args:
        world: started or joined.
        taps: the activations that will be taken.
        prepare: maps the batch to the teacher's; None: the batch itself.
        device: of the student, where activations are taken to.
        module: the teacher where it was given as a module.

    Raises:
        TeacherError: the teacher cannot be loaded or spread.
    """

    def __init__(
        self,
        world: World,
        taps: Sequence[Tap],
        *,
        prepare: Callable[[Any], Mapping[str, Any]] | None,
        device: torch.device,
        module: nn.Module | None,
    ) -> None:
        self._world, self._prepare, self._device = world, prepare, device
        try:
            self.facts = _facts(world, taps, None if module is None else head_of(module))
            self._taps = taps_in_effect(taps, self.facts.head_form)
        except BaseException:
            world.close()
            raise

    def place(self) -> TeacherExecutor:
        return WorldExecutor(self._world, self._taps, prepare=self._prepare, facts=self.facts, device=self._device)

    def abandon(self) -> None:
        self._world.close()


def _micro_batches(wanted: int | None, placement: TeacherPlacement, split: Split) -> int:
    if wanted is not None and placement.strategy != "pp":
        raise PlacementError(
            f"teacher_micro_batches={wanted} cuts the requests of strategy='pp', but the strategy is "
            f"{placement.strategy!r}. Leave it out."
        )
    if placement.strategy != "pp":
        return 1
    # The CPU slots of a pipeline are one device: parts would not be computed at the same time.
    return wanted or (1 if split.device_type == "cpu" else len(split.teacher_indices))


def _facts(world: World, taps: Sequence[Tap], head: Head | None) -> TeacherFacts:
    told = world.facts()
    values: dict[Tap, Tensor] = {}
    form = HeadForm(**told["head_form"]) if isinstance(told["head_form"], dict) else told["head_form"]
    for tap, (dtype, shape) in zip(taps_in_effect(taps, form), told["values"], strict=True):
        values[tap] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
    columns = None if told["columns"] is None else tuple(told["columns"])
    return TeacherFacts(
        values=values,
        columns=columns,
        vocab_size=told["vocab_size"],
        class_name=told["class"],
        shifts_labels=told["shifts_labels"],
        memory=tuple(DeviceMemory(place, tuple(map(tuple, parts)), size) for place, parts, size in told["memory"]),
        main_input=told["main_input"],
        head=head or open_head(told["head"]),
        divides=told["divides"],
        head_form=form,
    )


def _from_first_rank(value: Any) -> Any:
    """Return what the first rank of this node gave."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    node = os.environ.get("GROUP_RANK", socket.gethostname())
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    given: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(given, (node, first, value))
    return next(sent for where, is_first, sent in given if is_first and where == node)

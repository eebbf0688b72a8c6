"""The frozen answer to "what exactly will run here", worked out from plain values without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from silverspoon_kd.distributed.split_gpu import Split
from silverspoon_kd.distributed.teacher_placement import PlacementValue, TeacherPlacement
from silverspoon_kd.errors import ConfigurationError, PlacementError, near_names

DISTILLER_KINDS = {
    "blockwise": "blockwise",
    "bkd": "blockwise",
    "holistic": "holistic",
    "hkd": "holistic",
    "response_based": "response_based",
    "reskd": "response_based",
}
STUDENT_MODES = ("single", "ddp", "fsdp", "deepspeed-0", "deepspeed-1", "deepspeed-2", "deepspeed-3")


@dataclass(frozen=True)
class DeviceMemory:
    """The bytes that one device will hold at once, as far as they can be known before anything runs.

    Attributes:
        place: Where, such as ``"cuda:2"``, or ``"each rank"`` for the device that each student rank trains on.
        parts: What it will hold, with the bytes of it; None: not known.
        capacity: Bytes that the device has; None: not known.
    """

    place: str
    parts: tuple[tuple[str, int | None], ...]
    capacity: int | None = None

    @property
    def total(self) -> int:
        """Bytes of all parts that are known."""
        return sum(size or 0 for _, size in self.parts)

    def to_dict(self) -> dict[str, Any]:
        """Return the bytes as a dict of JSON values."""
        return {"place": self.place, "total": self.total, "parts": dict(self.parts), "capacity": self.capacity}

    def __str__(self) -> str:
        parts = [f"{name} {_size(size)}" for name, size in self.parts if size]
        unknown = [f"{name} not known" for name, size in self.parts if size is None]
        return f"{'at least ' if unknown else ''}{_size(self.total)}: {', '.join(parts + unknown) or 'nothing'}"


@dataclass(frozen=True)
class Plan:
    """What will run: who trains where, where the teacher is, and what runs at the same time.

    Attributes:
        distiller: ``"blockwise"``, ``"holistic"`` or ``"response_based"``.
        teacher: ``"replicated"``, ``"sharded"``, ``"dedicated-pp"``, ``"dedicated-tp"`` or ``"dedicated-sharded"``.
        teacher_device_type: Type of the teacher's own devices; None where it shares the student's.
        teacher_devices: Logical indices of the teacher's own devices on each node; empty where it has none.
        num_teacher_processes: Processes of the teacher's own on each node.
        num_teacher_copies: Copies of the teacher's weights over all nodes.
        student_mode: One of `STUDENT_MODES`.
        num_student_ranks: Student processes over all nodes.
        num_nodes: Number of nodes.
        overlap: Whether teacher forwards run at the same time as the student.
        lookahead: How many further steps the teacher may run ahead; 0 without overlap.
        notes: What the user should know about this plan, a sentence each.
        refusal: Why this cannot run, in one sentence; None if it can.
        memory: What each device will need; empty while that is not known.
        logits: Whether the losses on logits make them; empty for distillers that have none.
    """

    distiller: str
    teacher: str
    teacher_device_type: str | None
    teacher_devices: tuple[int, ...]
    num_teacher_processes: int
    num_teacher_copies: int
    student_mode: str
    num_student_ranks: int
    num_nodes: int
    overlap: bool
    lookahead: int
    notes: tuple[str, ...]
    refusal: str | None
    memory: tuple[DeviceMemory, ...] = ()
    logits: str = ""

    def __str__(self) -> str:
        return self.table()

    def with_memory(self, memory: Sequence[DeviceMemory]) -> "Plan":
        """Return this plan with what each device will need, and a note where one does not have so much."""
        return replace(self, memory=tuple(memory), notes=(*self.notes, *_memory_notes(memory)))

    def require_runnable(self) -> None:
        """Raise `PlacementError` with the refusal, if there is one."""
        if self.refusal is not None:
            raise PlacementError(self.refusal)

    def table(self) -> str:
        """Return the plan as a short text table, one line a row."""
        rows = list(self._rows())
        width = max(len(name) for name, _ in rows)
        return "\n".join(f"{name:<{width}}  {text}" for name, text in rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as a dict of JSON values."""
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(self).items()}
        return {**values, "memory": [each.to_dict() for each in self.memory]}

    def _rows(self) -> Iterator[tuple[str, str]]:
        yield "distiller", self.distiller
        yield "teacher", f"{self.teacher}, {_count(self.num_teacher_copies, 'copy', 'copies')}"
        if self.teacher_devices:
            devices = " ".join(f"{self.teacher_device_type}:{index}" for index in self.teacher_devices)
            processes = _count(self.num_teacher_processes, "process", "processes")
            yield "teacher devices", f"{devices} of each node, {processes}"
        ranks, nodes = _count(self.num_student_ranks, "rank", "ranks"), _count(self.num_nodes, "node", "nodes")
        yield "student", f"{self.student_mode}, {ranks} on {nodes}"
        yield "overlap", f"on, lookahead {self.lookahead}" if self.overlap else "off"
        if self.logits:
            yield "logits", self.logits
        for each in self.memory:
            yield f"memory {each.place}", str(each)
        for note in self.notes:
            yield "note", note
        if self.refusal is not None:
            yield "refused", self.refusal


def resolve_plan(
    *,
    distiller: str,
    placement: object = None,
    student_mode: str = "single",
    num_student_ranks: int = 1,
    num_nodes: int = 1,
    split: Split | None = None,
    student_device_type: str | None = None,
    overlap: bool | None = None,
    lookahead: int = 1,
) -> Plan:
    """Work out what will run. Pure: it reads no environment and imports nothing.

    Args:
        distiller: A distiller's name or alias.
        placement: Every form that `TeacherPlacement.from_value` takes.
        student_mode: One of `STUDENT_MODES`.
        num_student_ranks: Student processes over all nodes.
        num_nodes: Number of nodes.
        split: The divided devices of a node, for a `TeacherPlacement`.
        student_device_type: Type of the student's device, if known.
        overlap: ``overlap_teacher_forward``. None: on exactly when the teacher has devices of its own.
        lookahead: ``teacher_lookahead``.

    Returns:
        The plan. A combination that cannot run is a plan with a ``refusal``, not an error.

    Raises:
        ConfigurationError: A single value is none of those allowed.
    """
    kind, value = resolve_distiller(distiller), TeacherPlacement.from_value(placement)
    _check_values(student_mode, num_student_ranks, num_nodes, overlap, lookahead)
    dedicated = value if isinstance(value, TeacherPlacement) else None
    overlaps = dedicated is not None if overlap is None else overlap
    copies = {"replicated": num_student_ranks, "sharded": 1}
    return Plan(
        distiller=kind,
        teacher=f"dedicated-{dedicated.strategy}" if dedicated else str(value),
        teacher_device_type=dedicated.resolved_device_type if dedicated else None,
        teacher_devices=split.teacher_indices if dedicated and split else (),
        num_teacher_processes=_num_teacher_processes(dedicated) if dedicated else 0,
        num_teacher_copies=num_nodes if dedicated else copies[str(value)],
        student_mode=student_mode,
        num_student_ranks=num_student_ranks,
        num_nodes=num_nodes,
        overlap=overlaps,
        lookahead=lookahead if overlaps else 0,
        notes=tuple(_notes(value, overlaps, num_student_ranks // num_nodes, split)),
        refusal=next(_refusals(value, student_mode, num_student_ranks, num_nodes, split, student_device_type), None),
    )


def resolve_distiller(name: object) -> str:
    """Return the distiller kind that a name or alias stands for.

    Raises:
        ConfigurationError: The name is unknown.
    """
    kind = DISTILLER_KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        hint = near_names(str(name), DISTILLER_KINDS)
        raise ConfigurationError(f"Distiller {name!r} is unknown.{hint} Give one of {', '.join(DISTILLER_KINDS)}.")
    return kind


def _check_values(student_mode: str, num_student_ranks: int, num_nodes: int, overlap: object, lookahead: int) -> None:
    if student_mode not in STUDENT_MODES:
        hint = near_names(str(student_mode), STUDENT_MODES)
        raise ConfigurationError(f"student_mode={student_mode!r} is unknown.{hint} Give {', '.join(STUDENT_MODES)}.")
    if overlap is not None and not isinstance(overlap, bool):
        raise ConfigurationError(f"overlap_teacher_forward={overlap!r} is not a choice. Give None, True or False.")
    numbers = {
        "num_student_ranks": (num_student_ranks, 1),
        "num_nodes": (num_nodes, 1),
        "teacher_lookahead": (lookahead, 0),
    }
    for name, (value, least) in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigurationError(f"{name}={value!r} is not possible. Give a whole number from {least}.")


def _refusals(
    value: PlacementValue,
    student_mode: str,
    num_student_ranks: int,
    num_nodes: int,
    split: Split | None,
    student_device_type: str | None,
) -> Iterator[str]:
    """Yield every reason why a combination cannot run; the first one is told."""
    if student_mode == "single" and num_student_ranks > 1:
        yield (
            f"student_mode='single' trains in one process, but there are {num_student_ranks} student ranks; "
            "use 'ddp', 'fsdp' or DeepSpeed, or start one process."
        )
    if student_mode == "fsdp" and num_student_ranks == 1:
        yield (
            "fsdp shards the student over ranks, but this process is alone; launch with torchrun --nproc_per_node=2, "
            "or leave fsdp out."
        )
    if num_student_ranks < num_nodes:
        yield f"{num_nodes} nodes need at least one student rank each, but there are {num_student_ranks} ranks."
    if value == "sharded" and num_student_ranks == 1:
        yield (
            "teacher_placement='sharded' needs at least two ranks, but this process is alone; launch with torchrun "
            "--nproc_per_node=2, or use 'replicated'."
        )
    if isinstance(value, TeacherPlacement):
        yield from _dedicated_refusals(value, num_student_ranks, num_nodes, split, student_device_type)


def _dedicated_refusals(
    placement: TeacherPlacement,
    num_student_ranks: int,
    num_nodes: int,
    split: Split | None,
    student_device_type: str | None,
) -> Iterator[str]:
    device_type, wanted = placement.resolved_device_type, placement.teacher_only_devices
    if student_device_type not in (None, device_type):
        yield (
            f"teacher_only_devices={wanted} are {device_type} devices, but the student trains on "
            f"{student_device_type}; give the placement device_type={student_device_type!r}, or train the student on "
            f"{device_type}."
        )
    if split is None:
        yield (
            f"teacher_only_devices={wanted} needs setup_split_gpu(placement) at the top of the script, before "
            "'import torch'."
        )
        return
    if (split.device_type, list(split.teacher_ids)) != (device_type, wanted):
        yield (
            f"setup_split_gpu was called for {split.device_type} devices {list(split.teacher_ids)}, but the placement "
            f"asks for {device_type} devices {wanted}; use one placement for both."
        )
    if num_student_ranks % num_nodes:
        yield (
            f"{num_student_ranks} student ranks cannot be divided over {num_nodes} nodes with one teacher each; start "
            "the same number on every node."
        )
    per_node, room = num_student_ranks // num_nodes, len(split.student_ids)
    if per_node > room:
        yield (
            f"{per_node} student ranks per node do not fit on the {room} {device_type} devices that "
            f"teacher_only_devices={wanted} leaves; start at most {room} processes on this node."
        )


def _notes(value: PlacementValue, overlap: bool, ranks_per_node: int, split: Split | None) -> Iterator[str]:
    if value == "sharded" and overlap:
        yield (
            "Teacher and student communicate at the same time on the same devices; if ranks ever wait for each other, "
            "set overlap_teacher_forward=False."
        )
    if isinstance(value, TeacherPlacement) and split is not None and ranks_per_node < len(split.student_ids):
        room = len(split.student_ids)
        yield (
            f"{room - ranks_per_node} of the {room} student devices of a node stay idle; torchrun "
            f"--nproc_per_node={room} uses all."
        )


def _memory_notes(memory: Sequence[DeviceMemory]) -> Iterator[str]:
    for each in memory:
        if each.capacity is not None and each.total > each.capacity:
            largest = max(each.parts, key=lambda part: part[1] or 0)[0]
            yield (
                f"{each.place} will need {_size(each.total)}, but has {_size(each.capacity)}; most of it is "
                f"{largest}: use more devices for the teacher, smaller batches or a smaller teacher_lookahead."
            )


def _size(nbytes: int) -> str:
    """Return a number of bytes in three digits or so."""
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if nbytes >= 1024**power:
            return f"{nbytes / 1024**power:.2f} {unit}"
    return f"{nbytes} B"


def _num_teacher_processes(placement: TeacherPlacement) -> int:
    """One process drives a whole pipeline; the other strategies have one per device."""
    return 1 if placement.strategy == "pp" else len(placement.teacher_only_devices)


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"

"""Give the student the low device numbers and the teacher the ones after them, before torch counts devices."""

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from silverspoon_kd.distributed.teacher_placement import TeacherPlacement
from silverspoon_kd.distributed.visible_devices import (
    DEVICE_FAMILIES,
    VisibleDevices,
    accelerator_missing,
    accelerator_started,
    read_visible_devices,
)
from silverspoon_kd.errors import DeviceStateError, PlacementError

logger = logging.getLogger(__name__)

SPLIT_VARIABLE = "SILVERSPOON_KD_SPLIT"
PCI_ORDER = "PCI_BUS_ID"


@dataclass(frozen=True)
class Split:
    """The devices of one node, divided.

    Attributes:
        device_type: torch's name of the device type.
        student_ids: Physical ids of the student's devices; their logical indices are 0, 1, ...
        teacher_ids: Physical ids of the teacher's devices; their logical indices follow the student's.
        cores: For ``"cpu"``: the core of each slot, by its id; empty where slots were counted by hand.
    """

    device_type: str
    student_ids: tuple[int, ...]
    teacher_ids: tuple[int, ...]
    cores: tuple[int, ...] = ()

    @property
    def teacher_indices(self) -> tuple[int, ...]:
        """Logical indices of the teacher's devices."""
        first = len(self.student_ids)
        return tuple(range(first, first + len(self.teacher_ids)))


def setup_split_gpu(placement: TeacherPlacement) -> tuple[list[int], list[int]]:
    """Reorder the visible devices so that the student's come first and the teacher's follow.

    Call it at the top of the script, before torch is imported (at the latest before anything uses a device). It only
    reorders the devices that the job may use already. It may be called again, in any process and in its children: the
    answer stays the same. With ``device_type="cpu"`` devices are CPU slots, and no list of devices is written: this
    process and its children stay on the cores of the student's slots, unless ``SILVERSPOON_CPU_SLOTS`` counts slots.

    Args:
        placement: Which devices are the teacher's, by physical id.

    Returns:
        Physical ids of the student's devices, and logical indices of the teacher's devices.

    Raises:
        PlacementError: The placement does not fit the visible devices. The environment is then unchanged.
        RuntimeError: The devices cannot be counted, or torch already uses them. The environment is then unchanged.
    """
    placement = _checked(placement)
    split = recall_split(placement, os.environ)
    if split is None:
        family = DEVICE_FAMILIES[placement.resolved_device_type]
        if accelerator_started(family.device_type):
            raise DeviceStateError(
                f"setup_split_gpu({placement}) came too late: torch already uses a {family.device_type} device in this "
                "process, and a changed device list would be ignored. Call it at the top of the script, before "
                "'import torch'."
            )
        _give_cores_back(_read_record(os.environ))
        visible = read_visible_devices(family, os.environ)
        split = split_devices(placement, visible)
        # Everything that can fail is done: from here on the environment changes.
        os.environ.update(_split_environment(split, visible, os.environ))
        logger.debug("Devices %s are the student's and %s the teacher's.", split.student_ids, split.teacher_ids)
    if split.cores:
        os.sched_setaffinity(0, {split.cores[slot] for slot in split.student_ids})
    return list(split.student_ids), list(split.teacher_indices)


def split_devices(placement: TeacherPlacement, visible: VisibleDevices) -> Split:
    """Divide ``visible`` as ``placement`` asks: the student's in the order of the list, the teacher's as given.

    Raises:
        PlacementError: A side would be empty, an id is not visible, or the runtime cannot follow the order.
    """
    wanted, family = placement.teacher_only_devices, visible.family
    asked = f"teacher_only_devices={wanted}"
    if not wanted:
        raise PlacementError(f"{asked} leaves the teacher without a device. List at least one device id.")
    if len(visible.ids) == 1:
        raise PlacementError(
            f"{asked} cannot work: this process sees only one {family.device_type} device ({visible.source}), and "
            f"teacher and student need one each, so one of them would have none. {family.advice}"
        )
    for device in wanted:
        if device not in visible.ids:
            known = ",".join(map(str, visible.ids))
            raise PlacementError(
                f"{asked}: device {device} is not among the visible {family.device_type} devices {known} "
                f"({visible.source}). Choose from these. {family.advice}"
            )
    students = tuple(device for device in visible.ids if device not in wanted)
    if not students:
        raise PlacementError(
            f"{asked} takes all visible devices ({visible.source}) and leaves none for the student. "
            "Leave at least one device out."
        )
    if not family.any_order and [*students, *wanted] != sorted(visible.ids):
        last = sorted(visible.ids)[-len(wanted) :]
        raise PlacementError(
            f"{asked}: the runtime of device_type={family.device_type!r} only accepts ascending lists, so the "
            f"teacher's devices must be the last ones. Use teacher_only_devices={last}."
        )
    return Split(family.device_type, students, tuple(wanted), visible.cores)


def recall_split(placement: TeacherPlacement, environ: Mapping[str, str]) -> Split | None:
    """Return the split that ``setup_split_gpu(placement)`` made in this process or a parent, if it still holds."""
    record = _read_record(environ)
    if record is None or _difference(record, placement, environ):
        return None
    return _split_of(record)


def require_split_done(placement: TeacherPlacement) -> Split:
    """Return the split that ``setup_split_gpu(placement)`` made, and refuse to go on without it.

    Raises:
        PlacementError: It was not called, was called for other devices, or somebody changed the device list since.
        RuntimeError: It was called, but torch finds no device of the type.
    """
    device_type = placement.resolved_device_type
    kind = "GPU" if device_type == "cuda" else f"{device_type} device"
    missing = f" torch finds no {kind} on this machine: without one, use device_type='cpu'."
    missing = missing if accelerator_missing(device_type) else ""
    record = _read_record(os.environ)
    if record is None:
        raise PlacementError(
            f"teacher_placement={placement} needs setup_split_gpu(placement), which was not called in this process. "
            f"Call it at the top of the script, before 'import torch'.{missing}"
        )
    difference = _difference(record, placement, os.environ)
    if difference:
        raise PlacementError(
            f"teacher_placement={placement} does not fit what setup_split_gpu did: {difference}. Call "
            f"setup_split_gpu once, with this placement, and change no device list after it.{missing}"
        )
    if missing:
        raise DeviceStateError(f"teacher_placement={placement} reserves {device_type} devices.{missing}")
    return _split_of(record)


def check_student_processes(placement: TeacherPlacement, local_world_size: int) -> None:
    """Refuse more student processes on this node than the split left devices for them.

    Args:
        placement: The placement that ``setup_split_gpu`` was called with.
        local_world_size: Number of student processes on this node.

    Raises:
        PlacementError: Some processes would run on the teacher's devices, or there was no split.
    """
    split = require_split_done(placement)
    room = len(split.student_ids)
    if local_world_size > room:
        raise PlacementError(
            f"{local_world_size} processes were started on this node, but teacher_only_devices="
            f"{placement.teacher_only_devices} leaves {room} {split.device_type} devices for the student: at most "
            f"{room} processes on this node. Launch with torchrun --nproc_per_node={room}. "
            f"{DEVICE_FAMILIES[split.device_type].advice}"
        )


def _checked(placement: object) -> TeacherPlacement:
    value = TeacherPlacement.from_value(placement)
    if not isinstance(value, TeacherPlacement):
        raise PlacementError(
            f"setup_split_gpu got {placement!r}, which reserves no device. Give it a TeacherPlacement; other "
            "placements need no call."
        )
    return replace(value)  # checks again, as the list of ids may have been changed


def _split_environment(split: Split, visible: VisibleDevices, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to write: the reordered list, the numbering it relies on, and a record of both."""
    family = visible.family
    entry_of = dict(zip(visible.ids, visible.entries, strict=True))
    text = ",".join(entry_of[device] for device in (*split.student_ids, *split.teacher_ids))
    changes = dict.fromkeys(visible.variables, text)
    numbered = visible.entries == tuple(map(str, visible.ids))  # a UUID means the same GPU in every numbering
    if family.order_variable is not None and "CUDA_VISIBLE_DEVICES" in changes and numbered:
        changes |= _device_order(family.order_variable, environ)
    after = {**environ, **changes}
    state = {name: after.get(name) for name in family.watched_variables}
    changes[SPLIT_VARIABLE] = json.dumps({**asdict(split), "environment": state})
    return changes


def _device_order(variable: str, environ: Mapping[str, str]) -> dict[str, str]:
    """CUDA numbers the fastest GPU 0 by default; physical ids are those of ``nvidia-smi``, in the order of the bus."""
    order = environ.get(variable)
    if order and order != PCI_ORDER:
        raise PlacementError(
            f"{variable}={order} numbers GPUs in another order than nvidia-smi, so teacher_only_devices could mean "
            f"other GPUs. Unset it or set {variable}={PCI_ORDER}."
        )
    return {variable: PCI_ORDER}


def _give_cores_back(record: Mapping[str, Any] | None) -> None:
    """Undo what an earlier split did to this process, so that its slots are the machine's again."""
    if record is not None and record.get("cores"):
        os.sched_setaffinity(0, record["cores"])


def _read_record(environ: Mapping[str, str]) -> dict[str, Any] | None:
    """Return the record of the last split, or None if there is none that this version wrote."""
    try:
        record = json.loads(environ.get(SPLIT_VARIABLE, "null"))
    except json.JSONDecodeError:
        return None
    expected = {"device_type", "student_ids", "teacher_ids", "environment"}
    return record if isinstance(record, dict) and expected <= record.keys() else None


def _split_of(record: Mapping[str, Any]) -> Split:
    return Split(
        record["device_type"],
        tuple(record["student_ids"]),
        tuple(record["teacher_ids"]),
        tuple(record.get("cores", ())),
    )


def _difference(record: Mapping[str, Any], placement: TeacherPlacement, environ: Mapping[str, str]) -> str:
    """Say in what a recorded split differs from what ``placement`` needs now; empty if in nothing."""
    made_for = (record["device_type"], record["teacher_ids"])
    if made_for != (placement.resolved_device_type, placement.teacher_only_devices):
        return f"it was called for {made_for[0]} devices {made_for[1]}"
    for name, value in record["environment"].items():
        if environ.get(name) != value:
            return f"{name} was {value!r} after it and is {environ.get(name)!r} now"
    return ""

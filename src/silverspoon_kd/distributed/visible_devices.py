"""Which devices this process may use, read from its environment and never through torch.

The visible list of a vendor's runtime is the only thing that decides which physical device is device 0 of a process.
Asking torch would start that runtime and fix the list, so everything here works on text.
"""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from silverspoon_kd.errors import DeviceStateError, PlacementError

NVIDIA_SMI_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class DeviceFamily:
    """How one device type is told which devices a process may use.

    Attributes:
        device_type: torch's name of the type.
        list_variables: Variables that hold the visible list. Those that are set must agree, and are rewritten together.
        outer_variable: A list that is applied before and numbers its devices anew, from 0.
        order_variable: Variable that decides how devices are numbered, if there is one.
        slots_variable: Variable that holds a number of devices, for a type without a visible list.
        any_order: Whether the runtime follows the order of the list. If not, only ascending lists mean what they say.
        advice: How to let a process see more devices.
    """

    device_type: str
    list_variables: tuple[str, ...] = ()
    outer_variable: str | None = None
    order_variable: str | None = None
    slots_variable: str | None = None
    any_order: bool = True
    advice: str = "Let every process see all devices that the job has on this node."

    @property
    def watched_variables(self) -> tuple[str, ...]:
        """Every variable that decides what a device number of this type means."""
        others = (self.outer_variable, self.order_variable, self.slots_variable)
        return (*self.list_variables, *(name for name in others if name is not None))


DEVICE_FAMILIES: dict[str, DeviceFamily] = {
    family.device_type: family
    for family in (
        DeviceFamily(
            "cuda",
            # On ROCm both names are honoured, and the ROCR one comes before them.
            list_variables=("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
            outer_variable="ROCR_VISIBLE_DEVICES",
            order_variable="CUDA_DEVICE_ORDER",
            advice="Let every process see all GPUs that the job has on this node (SLURM: --gpus-per-node, not "
            "--gpus-per-task).",
        ),
        DeviceFamily("npu", list_variables=("ASCEND_RT_VISIBLE_DEVICES",), any_order=False),
        DeviceFamily("xpu", list_variables=("ZE_AFFINITY_MASK",), any_order=False),
        DeviceFamily(
            "cpu",
            slots_variable="SILVERSPOON_CPU_SLOTS",
            advice="Set SILVERSPOON_CPU_SLOTS to the number of CPU slots to use.",
        ),
    )
}


@dataclass(frozen=True)
class VisibleDevices:
    """The devices of one process, in the order of their logical indices.

    Attributes:
        family: Their device type.
        ids: Physical ids, as the user names them.
        entries: What stands for each of them in the visible list: the id, or its UUID where the list has UUIDs.
        variables: Variables that a changed list must be written to; none for CPU slots.
        cores: The core of each CPU slot; empty for devices, and where slots were counted by hand.
    """

    family: DeviceFamily
    ids: tuple[int, ...]
    entries: tuple[str, ...]
    variables: tuple[str, ...]
    cores: tuple[int, ...] = ()

    @property
    def source(self) -> str:
        """The list with its variable, for messages."""
        shown = ",".join(self.entries)
        return f"{self.variables[0]}={shown}" if self.variables else f"slots {shown}"


def read_visible_devices(family: DeviceFamily, environ: Mapping[str, str]) -> VisibleDevices:
    """Find the devices that a process with the environment ``environ`` may use.

    Raises:
        PlacementError: The list is empty, ambiguous, or of a form that cannot be reordered.
        DeviceStateError: The list is not set and the devices cannot be counted.
    """
    if family.slots_variable is not None:
        return _cpu_slots(family, family.slots_variable, environ)
    variables = tuple(name for name in family.list_variables if name in environ)
    if not variables:
        return _whole_machine(family, environ)
    lists = [_parse_list(family, name, environ[name]) for name in variables]
    for name, entries in zip(variables, lists, strict=True):
        if entries != lists[0]:
            raise PlacementError(
                f"{variables[0]}={environ[variables[0]]} and {name}={environ[name]} differ, and which of them counts "
                "depends on the runtime. Set only one of them, or both to the same list."
            )
    ids = _physical_ids(family, variables[0], lists[0])
    devices = VisibleDevices(family, ids, lists[0], variables)
    _check_outer_list(devices, environ)
    return devices


def count_nvidia_gpus() -> int:
    """Return the number of GPUs that ``nvidia-smi`` lists; it does not look at CUDA_VISIBLE_DEVICES.

    Raises:
        DeviceStateError: The tool is missing, fails, or does not answer.
    """
    return len(_ask_nvidia_smi("index"))


def accelerator_started(device_type: str) -> bool:
    """Whether torch has been imported here and already uses a device of this type, so that lists are fixed."""
    module = getattr(sys.modules.get("torch"), device_type, None)
    started = getattr(module, "is_initialized", None)
    return device_type != "cpu" and started is not None and bool(started())


def accelerator_missing(device_type: str) -> bool:
    """Whether torch has been imported here and finds no device of this type."""
    if device_type == "cpu" or "torch" not in sys.modules:
        return False
    module = getattr(sys.modules["torch"], device_type, None)
    return module is None or not module.is_available()


def _cpu_slots(family: DeviceFamily, variable: str, environ: Mapping[str, str]) -> VisibleDevices:
    text = environ.get(variable)
    if text is None:
        affinity = getattr(os, "sched_getaffinity", None)  # Linux only
        cores = tuple(sorted(affinity(0))) if affinity else ()
        count = len(cores) or os.cpu_count() or 1
    elif text.strip().isdecimal() and int(text) > 0:
        cores, count = (), int(text)
    else:
        raise PlacementError(f"{variable}={text!r} is not a number of CPU slots. Give a whole number from 1.")
    ids = tuple(range(count))
    return VisibleDevices(family, ids, tuple(map(str, ids)), (), cores=cores)


def _whole_machine(family: DeviceFamily, environ: Mapping[str, str]) -> VisibleDevices:
    """Every device of the machine, for a process whose visible list is not set."""
    if family.outer_variable is not None and family.outer_variable in environ:
        count = len(_parse_list(family, family.outer_variable, environ[family.outer_variable]))
        variable = family.list_variables[-1]  # the outer list is ROCm's, so the inner one is too
    elif family.device_type == "cuda":
        count, variable = count_nvidia_gpus(), family.list_variables[0]
    else:
        name = family.list_variables[0]
        raise DeviceStateError(
            f"The number of {family.device_type} devices is unknown: {name} is not set. "
            f"Set {name} to the ids of this job's devices."
        )
    ids = tuple(range(count))
    return VisibleDevices(family, ids, tuple(map(str, ids)), (variable,))


def _parse_list(family: DeviceFamily, variable: str, text: str) -> tuple[str, ...]:
    """Split a visible list as the runtime does: blanks skipped, an empty tail ignored, -1 ends the list."""
    entries = [part.strip() for part in text.split(",")]
    while entries and not entries[-1]:
        entries.pop()
    if "-1" in entries:
        entries = entries[: entries.index("-1")]
    if not entries or entries == ["NoDevFiles"]:  # the latter is what SLURM writes for a job without GPUs
        kind = "GPU" if family.device_type == "cuda" else f"{family.device_type} device"
        raise DeviceStateError(
            f"{variable}={text!r} makes no {kind} visible to this process, so there is none for the teacher. "
            "Give the job devices, or use device_type='cpu'."
        )
    plain = tuple(str(int(entry)) if entry.isdecimal() else entry for entry in entries)
    for entry in plain:
        if plain.count(entry) > 1:
            raise PlacementError(f"{variable}={text} lists {entry} more than once. List each device once.")
    return plain


def _physical_ids(family: DeviceFamily, variable: str, entries: tuple[str, ...]) -> tuple[int, ...]:
    text = ",".join(entries)
    if any(entry.startswith("MIG-") for entry in entries):
        raise PlacementError(
            f"{variable}={text} lists MIG instances. Split-GPU is not possible with MIG: a process can use only one "
            "instance. Use whole GPUs, or teacher_placement='replicated'."
        )
    if all(entry.isdecimal() for entry in entries):
        return tuple(map(int, entries))
    if family.device_type == "cuda" and all(entry.startswith("GPU-") for entry in entries):
        return _ids_of_uuids(variable, entries)
    raise PlacementError(
        f"{variable}={text} is not a list of whole devices in one form, so the runtime would use only a part of it. "
        "List all devices by their integer ids."
    )


def _ids_of_uuids(variable: str, entries: tuple[str, ...]) -> tuple[int, ...]:
    text = ",".join(entries)
    way_out = f"List the integer ids of nvidia-smi in {variable} instead of UUIDs."
    try:
        rows = _ask_nvidia_smi("index,uuid")
    except DeviceStateError as error:
        raise DeviceStateError(
            f"{variable}={text} lists UUIDs, and their ids are unknown. {error} {way_out}"
        ) from error
    ids = []
    for entry in entries:
        # A list may hold the beginning of a UUID, if only one GPU's UUID begins so.
        matches = [row[0] for row in rows if row[1].startswith(entry)]
        if len(matches) != 1 or int(matches[0]) in ids:
            raise PlacementError(
                f"{variable}={text}: the UUID {entry} stands for {len(matches)} GPUs of this machine, or for one that "
                f"another entry stands for. {way_out}"
            )
        ids.append(int(matches[0]))
    return tuple(ids)


def _check_outer_list(devices: VisibleDevices, environ: Mapping[str, str]) -> None:
    """Ids of a ROCm list are positions in the ROCR list, if that is set."""
    outer = devices.family.outer_variable
    # Some schedulers set the ROCR variable next to the CUDA one on NVIDIA machines, where nothing reads it.
    if outer is None or outer not in environ or "HIP_VISIBLE_DEVICES" not in devices.variables:
        return
    count = len(_parse_list(devices.family, outer, environ[outer]))
    if max(devices.ids) >= count:
        raise PlacementError(
            f"{devices.source} counts within {outer}={environ[outer]}, which has only {count} devices numbered from 0. "
            f"Correct the list, or unset {outer}."
        )


def _ask_nvidia_smi(columns: str) -> list[list[str]]:
    """Return the rows of an ``nvidia-smi`` query, first column a number."""
    unknown = (
        "The GPU count is unknown: {reason}. Set CUDA_VISIBLE_DEVICES (ROCm: HIP_VISIBLE_DEVICES) to the ids of this "
        'job\'s GPUs, or use device_type="cpu" on a machine without an accelerator.'
    )
    command = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=NVIDIA_SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise DeviceStateError(
            unknown.format(reason=f"nvidia-smi did not answer within {NVIDIA_SMI_TIMEOUT_S:g} s")
        ) from None
    except OSError as error:
        raise DeviceStateError(unknown.format(reason=f"nvidia-smi cannot be run ({error})")) from None
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.stdout.splitlines() if line.strip()]
    well_formed = all(row[0].isdecimal() and len(row) == columns.count(",") + 1 for row in rows)
    if answer.returncode != 0 or not rows or not well_formed:
        said = " ".join((answer.stderr.strip() or answer.stdout.strip() or "nothing").split())
        reason = f"nvidia-smi ended with exit code {answer.returncode} and said {said!r}"
        raise DeviceStateError(unknown.format(reason=reason))
    return rows

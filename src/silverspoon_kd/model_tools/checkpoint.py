"""Read a student and its projectors from a checkpoint. Nothing is unpickled: safetensors and JSON only."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from silverspoon_kd.errors import CheckpointError, ConfigurationError, near_names
from silverspoon_kd.projectors import build_projector

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PROJECTORS_FILE = "projectors.safetensors"
DISTILLATION_FILE = "distillation.json"
FORMAT = 1

_SIDES = ("input", "output")


def load_student_weights_from_checkpoint(student: nn.Module, checkpoint_dir: str | Path) -> nn.Module:
    """Load the student's weights from a checkpoint into ``student``.

    Args:
        student: Changed in place; it must have the architecture and the sizes of the saved one. Its dtype and device
            stay.
        checkpoint_dir: A folder with ``model.safetensors``, or with its shards and ``model.safetensors.index.json``.

    Returns:
        ``student``.

    Raises:
        CheckpointError: A file is missing or truncated, or the weights are those of another model.
    """
    folder = _folder(checkpoint_dir)
    shards = _shards(folder)
    if isinstance(student, PreTrainedModel):
        state = _read_as_transformers_does(student, folder)
    else:
        with _readable(folder):
            state = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
        _check_names(student, state, folder)
    try:
        student.load_state_dict(state, strict=False)
    except RuntimeError as error:
        raise CheckpointError(
            f"The weights in {folder} do not fit {type(student).__name__}: {error} Build the student with the sizes of "
            "the saved one."
        ) from error
    return student


def load_student_with_projectors_from_checkpoint(
    student: nn.Module, checkpoint_dir: str | Path
) -> tuple[nn.Module, dict[str, dict[str, nn.Module | None]]]:
    """Load the student's weights and rebuild the projectors that were trained with it.

    Args:
        student: As in :func:`load_student_weights_from_checkpoint`.
        checkpoint_dir: A checkpoint folder with ``distillation.json`` and, where there are projectors,
            ``projectors.safetensors``.

    Returns:
        ``student`` and alignment name -> ``{"input": module or None, "output": module or None}``, on the student's
        device.

    Raises:
        CheckpointError: A file is missing, truncated or foreign, or a projector is of a kind that only its author can
            build.
    """
    folder = _folder(checkpoint_dir)
    projectors = _read_projectors(folder)
    load_student_weights_from_checkpoint(student, folder)
    device = next((parameter.device for parameter in student.parameters()), torch.device("cpu"))
    for sides in projectors.values():
        for module in sides.values():
            if module is not None:
                module.to(device)
    return student, projectors


def _folder(checkpoint_dir: str | Path) -> Path:
    folder = Path(checkpoint_dir)
    if not folder.is_dir():
        raise CheckpointError(
            f"The checkpoint {str(folder)!r} is no folder. Pass a folder such as output/checkpoint-100."
        )
    return folder


def _shards(folder: Path) -> list[Path]:
    """The weight files, each of them checked to be complete."""
    names = [WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        weight_map = _read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map, so it is not the index of a checkpoint.")
        names = sorted(set(weight_map.values()))
    for name in names:
        if not (folder / name).is_file():
            present = sorted(path.name for path in folder.iterdir())
            raise CheckpointError(
                f"{folder} has no {name}; it has {present}. Save with safetensors, and copy the whole folder."
            )
        with _readable(folder / name), safe_open(folder / name, framework="pt"):
            pass
    return [folder / name for name in names]


def _read_as_transformers_does(student: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """Read with ``from_pretrained``: it knows the architectures whose saved names differ from those in memory."""
    try:
        loaded, report = type(student).from_pretrained(
            folder,
            config=type(student.config).from_dict(student.config.to_dict()),
            dtype=student.dtype,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise CheckpointError(
            f"The weights in {folder} cannot be read into {type(student).__name__}: {error}"
        ) from error
    for key, what in (("missing_keys", "lacks"), ("unexpected_keys", "has the unknown")):
        names = sorted(report[key])
        if names:
            raise _foreign(student, folder, f"it {what} {_few(names)}{near_names(names[0], student.state_dict())}")
    mismatched = sorted(report["mismatched_keys"])
    if mismatched:
        name, saved, here = mismatched[0]
        raise _foreign(student, folder, f"{name!r} is {list(saved)} there and {list(here)} here")
    return loaded.state_dict()


def _check_names(student: nn.Module, state: Mapping[str, Tensor], folder: Path) -> None:
    expected = student.state_dict()
    # Of tied tensors only one name is saved.
    stored = {expected[name].data_ptr() for name in state if name in expected}
    missing = [name for name, tensor in expected.items() if name not in state and tensor.data_ptr() not in stored]
    unknown = [name for name in state if name not in expected]
    if missing:
        raise _foreign(student, folder, f"it lacks {_few(missing)}")
    if unknown:
        raise _foreign(student, folder, f"it has the unknown {_few(unknown)}{near_names(unknown[0], expected)}")


def _foreign(student: nn.Module, folder: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"The weights in {folder} are not those of this {type(student).__name__}: {reason}. Build the student as it "
        "was when it was saved."
    )


def _few(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _read_projectors(folder: Path) -> dict[str, dict[str, nn.Module | None]]:
    path = folder / DISTILLATION_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {DISTILLATION_FILE}, so it was not saved by a distiller. Use "
            "load_student_weights_from_checkpoint for a plain model."
        )
    record = _read_json(path)
    if record.get("format") != FORMAT or not isinstance(record.get("alignments"), list):
        raise CheckpointError(
            f"{path} has format {record.get('format')!r}, but this version reads format {FORMAT}. Use the version that "
            "wrote it."
        )
    projectors: dict[str, dict[str, nn.Module | None]] = {}
    modules = nn.ModuleDict()
    for index, entry in enumerate(record["alignments"]):
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str) or entry["name"] in projectors:
            raise CheckpointError(f"{path}: alignment {index} has no name of its own: {entry!r}.")
        sides = {
            side: _build(entry.get(f"{side}_projector"), f"{path}: alignment {entry['name']!r}") for side in _SIDES
        }
        projectors[entry["name"]] = sides
        modules[str(index)] = nn.ModuleDict({side: module for side, module in sides.items() if module is not None})
    if modules.state_dict():
        _fill(modules, folder / PROJECTORS_FILE)
    return projectors


def _build(recipe: Any, where: str) -> nn.Module | None:
    if recipe is None:
        return None
    try:
        with torch.device("meta"):  # the values come from the file
            return build_projector(recipe["kind"], recipe["in"], recipe["out"], bias=recipe["bias"])
    except (KeyError, TypeError, RuntimeError, ConfigurationError) as error:
        raise CheckpointError(
            f"{where} has the projector {recipe!r}, which cannot be built here ({error!r}). Build it yourself, "
            f"read its weights from {PROJECTORS_FILE}, and load the student with load_student_weights_from_checkpoint."
        ) from error


def _fill(modules: nn.Module, path: Path) -> None:
    if not path.is_file():
        raise CheckpointError(f"{path} is missing, but {DISTILLATION_FILE} lists projectors. Copy the whole folder.")
    with _readable(path):
        state = load_file(path)
    try:
        modules.load_state_dict(state, strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not hold the projectors that {DISTILLATION_FILE} lists: {error}") from error
    modules.requires_grad_(True)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable JSON file: {error}. It may be truncated; save again.") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} holds a {type(record).__name__}, not an object. It is not from a checkpoint.")
    return record


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is no complete safetensors file ({error}). It may be truncated or still being written; save again."
        ) from error

"""Read a student and its projectors from a checkpoint. Nothing is unpickled: safetensors and JSON only."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from silverspoon_kd.errors import CheckpointError, ConfigurationError
from silverspoon_kd.projectors import build_projector
from silverspoon_kd.saved import FORMAT, PROJECTORS_FILE, STATE_FILE, load_student, read_json, read_tensors

_SIDES = ("input", "output")


def load_student_weights_from_checkpoint(student: nn.Module, checkpoint_dir: str | Path) -> nn.Module:
    """Load the student's weights from a checkpoint into ``student``.

    Args:
        student: Changed in place; it must have the architecture and the sizes of the saved one. Its dtype and device
            stay. A PEFT student gets the weights of its active adapter.
        checkpoint_dir: A folder with ``model.safetensors``, or with its shards and ``model.safetensors.index.json``, or
            with ``adapter_model.safetensors``.

    Returns:
        ``student``.

    Raises:
        CheckpointError: A file is missing or truncated, or the weights are those of another model.
    """
    load_student(_folder(checkpoint_dir), student)
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


def _read_projectors(folder: Path) -> dict[str, dict[str, nn.Module | None]]:
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} has no {STATE_FILE}, so it was not saved by a distiller. Use "
            "load_student_weights_from_checkpoint for a plain model."
        )
    record = read_json(path)
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
        raise CheckpointError(f"{path} is missing, but {STATE_FILE} lists projectors. Copy the whole folder.")
    try:
        modules.load_state_dict(read_tensors(path), strict=True, assign=True)
    except RuntimeError as error:
        raise CheckpointError(f"{path} does not hold the projectors that {STATE_FILE} lists: {error}") from error
    modules.requires_grad_(True)

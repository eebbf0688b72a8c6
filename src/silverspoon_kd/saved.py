"""The student in a checkpoint folder: read, checked, and loaded whole or not at all. Nothing is ever unpickled."""

import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from silverspoon_kd.capture import base_of, is_peft_model
from silverspoon_kd.errors import CheckpointError, near_names

logger = logging.getLogger(__name__)

FORMAT = 1
STATE_FILE = "distillation.json"
PROJECTORS_FILE = "projectors.safetensors"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


Weights = Mapping[str, Tensor]


def load_student(
    folder: Path, student: nn.Module, divide: Callable[[Weights, Weights], Weights] = lambda weights, own: weights
) -> None:
    """Load a student's weights in place; its dtype and device stay. A PEFT student gets those of its active adapter.

    Args:
        folder: with ``model.safetensors`` or its shards, or for a PEFT student ``adapter_model.safetensors``.
        student: of the architecture and the sizes of the saved one; unchanged if there is an error.
        divide: brings the read weights into the form of the student's own, where those are sharded.

    Raises:
        CheckpointError: a file is missing or truncated, or the weights are those of another model.
    """
    if is_peft_model(student):
        _load_adapter(folder, student, divide)
        return
    state: Weights = _read_weights(folder)
    own = student.state_dict()
    reason = _difference(own, state)
    if reason and isinstance(student, PreTrainedModel):
        # Some architectures are saved under other names than they have in memory.
        renamed = _read_as_transformers_does(folder, student)
        state, reason = (state, reason) if renamed is None else (renamed, "")
    _refuse(folder, student, reason)
    student.load_state_dict(divide(state, own), strict=False)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the content of a safetensors file.

    Raises:
        CheckpointError: it is truncated or damaged.
    """
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is damaged ({error}). It may be truncated or still being written; use an earlier checkpoint, or "
            "save again."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        CheckpointError: there is none.
    """
    try:
        record = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}). It may be truncated; use an earlier checkpoint, or save again."
        ) from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} cannot be read: it holds a {type(record).__name__}, not an object.")
    return record


def _read_weights(folder: Path) -> dict[str, Tensor]:
    names = [WEIGHTS_FILE]
    if (folder / INDEX_FILE).is_file():
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{folder / INDEX_FILE} has no weight_map, so it is not the index of a checkpoint.")
        names = sorted(set(weight_map.values()))
    weights: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).is_file():
            present = sorted(path.name for path in folder.iterdir())
            raise CheckpointError(
                f"{folder} has no {name}; it has {present}. Save with safetensors, and copy the whole folder."
            )
        weights |= read_tensors(folder / name)
    return weights


def _load_adapter(folder: Path, student: nn.Module, divide: Callable[[Weights, Weights], Weights]) -> None:
    from peft import get_peft_model_state_dict, set_peft_model_state_dict

    name: Any = student.active_adapter
    path = folder / ("" if name == "default" else str(name)) / "adapter_model.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} has no adapter_model.safetensors for the adapter {name!r}.")
    state, own = read_tensors(path), get_peft_model_state_dict(student, adapter_name=name)
    _refuse(folder, student, _difference(own, state))
    set_peft_model_state_dict(student, dict(divide(state, own)), adapter_name=name)


def _read_as_transformers_does(folder: Path, student: PreTrainedModel) -> Weights | None:
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
    except (OSError, ValueError, RuntimeError) as error:
        logger.debug("transformers cannot read %s into %s: %s", folder, type(student).__name__, error)
        return None
    differs = any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return None if differs else loaded.state_dict()


def _difference(own: Weights, state: Weights) -> str:
    """Say in what saved weights differ from those they should replace; "" if in nothing."""
    # Of tied tensors only one name is saved.
    stored = {_place(own[name]) for name in state if name in own}
    missing = [name for name, tensor in own.items() if name not in state and _place(tensor) not in stored]
    unknown = [name for name in state if name not in own]
    if missing:
        return f"it lacks {_few(missing)}"
    if unknown:
        return f"it has the unknown {_few(unknown)}{near_names(unknown[0], own)}"
    other = next((name for name, tensor in state.items() if tensor.shape != own[name].shape), None)
    return f"{other!r} is {list(state[other].shape)} there and {list(own[other].shape)} here" if other else ""


def _place(tensor: Any) -> int:
    # A sharded tensor has no place of its own; its class belongs to a part of torch that this layer does not know.
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).data_ptr()


def _refuse(folder: Path, student: nn.Module, reason: str) -> None:
    if reason:
        raise CheckpointError(
            f"The weights in {folder} are not those of this {type(base_of(student)).__name__}: {reason}. Build the "
            "student as it was when it was saved."
        )


def _few(names: list[str]) -> str:
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")

"""What lies in a checkpoint beside the Trainer's own files, and how a complete one is told from a broken one.

A checkpoint folder is the student as ``save_pretrained`` writes it, ``projectors.safetensors``, and
``distillation.json``. The last is written when everything else is there, by a rename, and names every file with its
size: a folder without it, or with other sizes, was not finished and is never resumed from. Nothing in it is ever
unpickled.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from silverspoon_kd.errors import CheckpointError
from silverspoon_kd.objectives import Objective
from silverspoon_kd.projectors import describe_projector
from silverspoon_kd.saved import FORMAT, PROJECTORS_FILE, STATE_FILE, WEIGHTS_FILE, load_student, read_tensors

logger = logging.getLogger(__name__)


def save_weights(
    folder: Path, student: nn.Module, projectors: nn.ModuleList, state_dict: Mapping[str, Tensor] | None
) -> None:
    """Write the student so that ``from_pretrained`` loads it, a plain module as ``model.safetensors``, and projectors.

    Args:
        folder: made if needed; it is no checkpoint any more until :func:`mark_complete`.
        student: the student.
        projectors: no file is written where there are none.
        state_dict: of the root, gathered from all ranks; None: the modules' own.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE_FILE).unlink(missing_ok=True)
    own = None if state_dict is None else _part(state_dict, "student.")
    save_pretrained = getattr(student, "save_pretrained", None)
    if callable(save_pretrained):
        save_pretrained(folder, state_dict=own)
    elif own is not None:
        safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in own.items()}, folder / WEIGHTS_FILE)
    else:
        safetensors.torch.save_model(student, str(folder / WEIGHTS_FILE))
    (folder / PROJECTORS_FILE).unlink(missing_ok=True)
    state = projectors.state_dict() if state_dict is None else _part(state_dict, "projectors.")
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if weights:
        safetensors.torch.save_file(weights, folder / PROJECTORS_FILE)


def _part(state_dict: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}


def mark_complete(
    folder: Path, objective: Objective, projectors: nn.ModuleList, extra: Mapping[str, Any], pattern: str = "*"
) -> None:
    """Write ``distillation.json``, which makes the folder a checkpoint.

    Args:
        folder: where everything else has been written.
        objective: whose alignments are described.
        projectors: of the alignments.
        extra: further entries.
        pattern: which files are named; a folder that is not only a checkpoint holds others that may change.
    """
    inner = {path for _, checkpoint in _numbered(folder) for path in checkpoint.rglob("*")}
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(set(folder.rglob(pattern)) - inner)
        if path.is_file() and path.name not in (STATE_FILE, STATE_FILE + ".part")
    }
    state = {
        "format": FORMAT,
        "distiller": objective.kind,
        "alignments": describe_alignments(objective, projectors),
        **extra,
        "files": files,
    }
    part = folder / (STATE_FILE + ".part")
    part.write_text(json.dumps(state, indent=2) + "\n")
    os.replace(part, folder / STATE_FILE)


def describe_alignments(objective: Objective, projectors: nn.ModuleList) -> list[dict[str, Any]]:
    """Return the JSON form of the alignments."""
    rows = []
    for name, alignment, projector in zip(objective.names, objective.alignments, projectors, strict=True):
        rows.append(
            {
                "name": name,
                "teacher_module": alignment.teacher_module_name,
                "student_module": alignment.student_module_name,
                "loss": alignment.loss.name,
                "input_projector": describe_projector(projector.input),  # type: ignore[arg-type]
                "output_projector": describe_projector(projector.output),  # type: ignore[arg-type]
            }
        )
    return rows


def check_resumable(folder: Path, objective: Objective, projectors: nn.ModuleList, student_mode: str) -> None:
    """Refuse a checkpoint that this run cannot continue from.

    Raises:
        CheckpointError: it is not there, incomplete, foreign, without optimizer state, of other alignments, or of
            another way of training the student.
    """
    state = read_state(folder)
    saved = [_identity(row) for row in state["alignments"]]
    own = [_identity(row) for row in describe_alignments(objective, projectors)]
    if state["distiller"] != objective.kind or saved != own:
        raise CheckpointError(
            f"The checkpoint {folder} is of a {state['distiller']} run with {len(saved)} alignments "
            f"({', '.join(row[0] for row in saved[:4])}...), but this is a {objective.kind} run with {len(own)} "
            f"({', '.join(row[0] for row in own[:4])}...). Resume with the same alignments, or start a new run from "
            "its student."
        )
    then, now = _wrapper(state["plan"]["student_mode"]), _wrapper(student_mode)
    if then != now:
        raise CheckpointError(
            f"The checkpoint {folder} holds the optimizer of a student trained with {then}, but this run trains it "
            f"with {now}. Resume as it was saved, or start a new run from its student."
        )
    kept = ("optimizer", "global_step")  # the latter is DeepSpeed's folder
    if "trainer_state.json" not in state["files"] or not any(name.startswith(kept) for name in state["files"]):
        raise CheckpointError(
            f"The checkpoint {folder} has no optimizer state (saved with save_only_model=True, or by save_model), so "
            "training cannot continue exactly. Start a new run from its student, or save full checkpoints."
        )


def _wrapper(student_mode: str) -> str:
    return "no sharding" if student_mode in ("single", "ddp") else student_mode


def read_state(folder: Path) -> dict[str, Any]:
    """Return the content of ``distillation.json`` of a complete checkpoint.

    Raises:
        CheckpointError: the folder is missing, foreign or incomplete.
    """
    if not folder.is_dir():
        raise CheckpointError(f"There is no checkpoint folder {folder}.")
    path = folder / STATE_FILE
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is no complete checkpoint of this library: it has no {STATE_FILE}, which is written last. "
            "Resume from an earlier checkpoint."
        )
    try:
        state = json.loads(path.read_text())
        sizes, version = dict(state["files"]), state["format"]
        _ = state["distiller"], state["plan"]["student_mode"], [_identity(row) for row in state["alignments"]]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error!r}). Resume from an earlier checkpoint.") from error
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version}, but this version reads format {FORMAT}.")
    for name, size in sizes.items():
        found = (folder / name).stat().st_size if (folder / name).is_file() else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise CheckpointError(
                f"The checkpoint {folder} is damaged: {name} {what}, but {size} bytes were written. Resume from an "
                "earlier checkpoint."
            )
    return state


def last_complete(output_dir: Path) -> tuple[Path | None, list[str]]:
    """Return the newest complete checkpoint of a run, and why newer ones were passed over."""
    reasons = []
    for _, path in reversed(_numbered(output_dir)):
        try:
            read_state(path)
        except CheckpointError as error:
            reasons.append(str(error))
        else:
            return path, reasons
    return None, reasons


def load_weights(folder: Path, student: nn.Module, projectors: nn.ModuleList) -> None:
    """Load the weights of student and projectors in place, both or none.

    Raises:
        CheckpointError: weights are missing, of another shape or damaged.
    """
    loaded = _projector_weights(folder, projectors)
    load_student(folder, student, as_sharded)
    projectors.load_state_dict(as_sharded(loaded, projectors.state_dict()))


def as_sharded(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return full ``weights`` in the form of the module's ``own``: this rank's shares where those are sharded."""

    def like(name: str, tensor: Tensor) -> Tensor:
        target = own.get(name)
        if not isinstance(target, DTensor):
            return tensor
        full = tensor.to(target.device, target.dtype)
        return distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)

    return {name: like(name, tensor) for name, tensor in weights.items()}


def _projector_weights(folder: Path, projectors: nn.ModuleList) -> dict[str, Tensor]:
    own = projectors.state_dict()
    path = folder / PROJECTORS_FILE
    weights = read_tensors(path) if path.is_file() else {}
    if weights.keys() != own.keys() or any(weights[name].shape != own[name].shape for name in own):
        raise CheckpointError(
            f"The projectors in {folder} do not fit this run: it has {sorted(weights)[:4]}, this run {sorted(own)[:4]}."
        )
    return weights


def _identity(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["name"], row["teacher_module"], row["student_module"]


def rotate(run_dir: Path, limit: int | None, newest: Path, best: str | None) -> None:
    """Delete checkpoints beyond ``limit``: unfinished ones first, then the oldest; never the newest or the best one.

    The age is that of the state file and not the step: an earlier run in the same folder may have gone further.
    """
    if not limit or limit < 0:
        return
    kept = {newest.resolve(), *([Path(best).resolve()] if best else [])}
    others = [path for _, path in _numbered(run_dir) if path.resolve() not in kept]
    surplus = len(others) + len(kept) - max(limit, len(kept))
    for path in sorted(others, key=_age)[: max(surplus, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _numbered(run_dir: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of a run's checkpoints, finished or not, in the order of the steps."""
    folders = [path for path in run_dir.glob("checkpoint-*") if path.is_dir()]
    return sorted((int(path.name[11:]), path) for path in folders if path.name[11:].isdigit())


def _age(folder: Path) -> tuple[bool, float]:
    state = folder / STATE_FILE
    return state.is_file(), (state if state.is_file() else folder).stat().st_mtime


def resume_folder(
    wish: str | bool | None, output_dir: Path, objective: Objective, projectors: nn.ModuleList, student_mode: str
) -> Path | None:
    """Return the checkpoint to resume from: the given one, or for True the newest complete one; None for no wish.

    Raises:
        CheckpointError: there is none, or this run cannot continue from it.
    """
    if not wish:
        return None
    folder: Path | None = None if wish is True else Path(wish)
    if folder is None:
        folder, passed_over = last_complete(output_dir)
        for reason in passed_over:
            logger.warning("%s", reason)
    if folder is None:
        raise CheckpointError(
            f"There is no complete checkpoint in {output_dir} to resume from. Start without resume_from_checkpoint."
        )
    check_resumable(folder, objective, projectors, student_mode)
    return folder

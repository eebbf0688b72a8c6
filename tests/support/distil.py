"""Distillers over tiny models, ready to train."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from silverspoon_kd import BlockwiseDistiller, HolisticDistiller, ResponseBasedDistiller, create_alignments
from support.tiny import Rows, arguments, collate, qwen3

LAYERS = r"model\.layers\.\d+"
KINDS = ("holistic", "blockwise", "response")


def make(
    kind: str,
    folder: Any,
    *,
    student: nn.Module | None = None,
    teacher: nn.Module | None = None,
    modules: Any = LAYERS,
    alignment: Mapping[str, Mapping[str, Any]] | None = None,
    given: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Any:
    """A distiller of one of KINDS.

    Args:
        kind: which.
        folder: the output folder.
        student: default: half as wide as the teacher, so that there are projectors.
        teacher: default: a Qwen3 model of 4 layers.
        modules: what is aligned; not for "response".
        alignment: student module name -> fields of its alignment.
        given: arguments of the distiller; train_dataset and data_collator have defaults.
        changes: of the training arguments.
    """
    teacher = qwen3(0) if teacher is None else teacher
    student = qwen3(1, hidden=16) if student is None else student
    values = {"train_dataset": Rows(), "data_collator": collate, **(given or {})}
    args = arguments(folder, **changes)
    if kind == "response":
        return ResponseBasedDistiller(student, teacher, args=args, **values)
    alignments = create_alignments(teacher, student, modules, output_selector_index=0)
    for each in alignments:
        for name, value in (alignment or {}).get(each.student_module_name, {}).items():
            setattr(each, name, value)
    return {"holistic": HolisticDistiller, "blockwise": BlockwiseDistiller}[kind](
        teacher, alignments, args=args, **values
    )


def training_logs(distiller: Any) -> list[dict[str, float]]:
    """The log entries of the training steps."""
    return [entry for entry in distiller.state.log_history if "loss" in entry]

"""One loss term of a batch: a sum, the unit it is counted in, and its weight."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.capture import Tap
from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import Loss
from silverspoon_kd.objectives.positions import UNITS, Positions


class TeacherSignals(Protocol):
    """Where the teacher's activations of one batch come from."""

    def take(self, tap: Tap) -> Tensor:
        """Return an activation, waiting for it if it is still being computed."""
        ...


@dataclass(frozen=True)
class Term:
    """``total / count of unit`` is the term's value; ``weight`` is its factor in the loss."""

    name: str
    total: Tensor
    unit: str
    weight: float = 1.0


@dataclass(frozen=True)
class Counts:
    """Positions in the whole step, int64 in the order of UNITS, and the factor that undoes averaging over ranks."""

    values: Tensor
    scale: float = 1.0

    def of(self, unit: str) -> Tensor:
        """Return the divisor of a unit; an empty one is 1, since its sum is 0."""
        return self.values[UNITS.index(unit)].clamp(min=1)


def alignment_term(name: str, alignment: Alignment, student: Tensor, teacher: Tensor, positions: Positions) -> Term:
    """Return the term of one alignment.

    Args:
        name: its name in logs.
        alignment: the loss and its weight are used.
        student: features of the student, already projected to the teacher's width.
        teacher: the teacher's features, on any device.
        positions: what counts in this batch.
    """
    teacher = teacher.to(student.device)
    mask, unit = mask_for(student, alignment, positions)
    if alignment.loss.layout == "positions" and student.dim() == teacher.dim() == 4:
        student, teacher = _pixels_as_positions(student), _pixels_as_positions(teacher)
    value = alignment.loss.sum_and_count(student, teacher, mask)
    total = value.total
    if unit == "rows":
        total = total / value.count.clamp(min=1) * positions.rows
    return Term(name=name, total=total, unit=unit, weight=alignment.loss_weight)


def feature_terms(
    alignments: Sequence[Alignment],
    names: Sequence[str],
    values: Mapping[Tap, Tensor],
    signals: TeacherSignals,
    projectors: Iterable[nn.Module],
    positions: Positions,
) -> list[Term]:
    """Return the terms of all alignments from what both models gave out."""
    terms = []
    for name, alignment, projector in zip(names, alignments, projectors, strict=True):
        student = projector.project_output(values[student_output(alignment)])  # type: ignore[operator]
        try:
            terms.append(alignment_term(name, alignment, student, signals.take(teacher_output(alignment)), positions))
        except LossError as error:
            raise LossError(f"Alignment {name!r}: {error}") from error
    return terms


def student_output(alignment: Alignment) -> Tap:
    """Return the tap of the student module's output."""
    return Tap(alignment.student_module_name, "output", alignment.student_output_selector)


def teacher_output(alignment: Alignment) -> Tap:
    """Return the tap of the teacher module's output."""
    return Tap(alignment.teacher_module_name, "output", alignment.teacher_output_selector)


def teacher_input(alignment: Alignment) -> Tap:
    """Return the tap of the hidden states that the teacher module takes in."""
    return Tap(alignment.teacher_module_name, "input")


def mask_for(features: Tensor, alignment: Alignment, positions: Positions) -> tuple[Tensor | None, str]:
    """Return which positions of ``features`` count for the loss of an alignment, None for all, and their unit."""
    loss: Loss = alignment.loss
    of_logits = loss.positions == "targets" or not alignment.student_module_name
    units = ["targets"] if of_logits else ["tokens", "decoder_tokens"]
    if "decoder" in alignment.student_module_name.split("."):
        units.reverse()
    for unit in units:
        mask = positions.masks.get(unit)
        if mask is None:
            continue
        if loss.layout == "attention" and features.dim() == 4:
            if (features.shape[0], features.shape[2]) == mask.shape:
                return mask, unit
        elif features.dim() >= 3 and features.shape[:2] == mask.shape:
            return mask, unit
        elif features.dim() == 2 and mask.shape[1] > 1 and features.shape[0] == mask.numel():
            return mask.flatten(), unit
    return None, "rows"


def _pixels_as_positions(features: Tensor) -> Tensor:
    """Turn ``[batch, channels, height, width]`` into ``[batch, height * width, channels]``."""
    return torch.flatten(features, 2).transpose(1, 2)

"""What the three distillers compute from one batch."""

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.alignment.alignment import alignment_names
from silverspoon_kd.capture import Tap, select_logits
from silverspoon_kd.objectives.fused import FusedHeads, FusedStep, FusedTask
from silverspoon_kd.objectives.positions import Positions
from silverspoon_kd.objectives.terms import (
    TeacherSignals,
    Term,
    feature_terms,
    student_output,
    teacher_input,
    teacher_output,
)


class Objective(abc.ABC):
    """How one batch becomes named loss terms. Knows no trainer, no rank and no placement."""

    kind: ClassVar[str]
    alignments: Sequence[Alignment]
    names: Sequence[str]
    # Of both models, where the loss of one alignment is computed from what they take in; None: from what modules give.
    heads: FusedHeads | None = None

    @property
    @abc.abstractmethod
    def student_taps(self) -> list[Tap]:
        """What is recorded of the student's forward."""

    @property
    @abc.abstractmethod
    def teacher_taps(self) -> list[Tap]:
        """What is needed of the teacher's forward, in the order in which it is taken."""

    @abc.abstractmethod
    def substitutions(
        self, signals: TeacherSignals, projectors: nn.ModuleList
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return, by student module, what replaces the hidden states it would take in."""

    @abc.abstractmethod
    def head_step(
        self, signals: TeacherSignals, positions: Positions, *, keep_logits: bool, task: FusedTask | None
    ) -> FusedStep | None:
        """Return what computes a term in the place of the student's head; None: the head makes logits.

        Args:
            signals: the teacher's activations of the batch.
            positions: what counts in it.
            keep_logits: the student's logits are wanted too, if there are no gradients.
            task: the student's own loss, to be computed there too; None: it is not asked for.
        """

    @abc.abstractmethod
    def terms(
        self, values: Mapping[Tap, Tensor], signals: TeacherSignals, projectors: nn.ModuleList, positions: Positions
    ) -> list[Term]:
        """Return the loss terms of a batch from the recorded student values, without that of :meth:`head_step`."""


class OutputObjective(Objective):
    """What modules give out is compared; gradients flow through the whole student.

    Args:
        alignments: of the run.
        heads: of both models, where the loss of the alignment of the two is computed from what they take in.
    """

    def __init__(self, alignments: Sequence[Alignment], heads: FusedHeads | None = None) -> None:
        self.alignments, self.names, self.heads = _own(alignments), alignment_names(alignments), heads

    @abc.abstractmethod
    def with_heads(self, heads: FusedHeads) -> "OutputObjective":
        """Return the same, one loss of which is computed from what the heads take in."""

    @property
    def student_taps(self) -> list[Tap]:
        taps = list(map(student_output, self.alignments))
        if self.heads is not None:
            taps[self._index_of(self.heads)] = self.heads.student_tap
        return _unique(taps)

    @property
    def teacher_taps(self) -> list[Tap]:
        taps = list(map(teacher_output, self.alignments))
        if self.heads is not None:
            taps[self._index_of(self.heads)] = self.heads.teacher_tap
        return _unique(taps)

    def substitutions(
        self, signals: TeacherSignals, projectors: nn.ModuleList
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        return {}

    def head_step(
        self, signals: TeacherSignals, positions: Positions, *, keep_logits: bool, task: FusedTask | None
    ) -> FusedStep | None:
        if self.heads is None:
            return None
        index = self._index_of(self.heads)
        name, alignment = self.names[index], self.alignments[index]
        return FusedStep(name, alignment, self.heads, signals, positions, keep_logits=keep_logits, task=task)

    def terms(
        self, values: Mapping[Tap, Tensor], signals: TeacherSignals, projectors: nn.ModuleList, positions: Positions
    ) -> list[Term]:
        fused = None if self.heads is None else self._index_of(self.heads)
        dense = [index for index in range(len(self.alignments)) if index != fused]
        return feature_terms(
            [self.alignments[index] for index in dense],
            [self.names[index] for index in dense],
            values,
            signals,
            [projectors[index] for index in dense],
            positions,
        )

    def _index_of(self, heads: FusedHeads) -> int:
        modules = [alignment.student_module_name for alignment in self.alignments]
        # The alignment of the logits names no module.
        return modules.index("" if "" in modules else heads.student.module)


class HolisticObjective(OutputObjective):
    """All aligned modules learn together in the student's own forward."""

    kind = "holistic"

    def with_heads(self, heads: FusedHeads) -> "HolisticObjective":
        """Return the same, one loss of which is of what both heads give out, before the models scale and cap it."""
        return HolisticObjective(self.alignments, heads.of_modules())


class ResponseObjective(OutputObjective):
    """The student's logits learn from the teacher's (Hinton et al., "Distilling the Knowledge in a Neural Network")."""

    kind = "response_based"

    def with_heads(self, heads: FusedHeads) -> "ResponseObjective":
        """Return the same, computed from what the heads take in."""
        return ResponseObjective(self.alignments, heads)


class BlockwiseObjective(Objective):
    """Each aligned block learns alone, from the teacher's input to its block, in one forward of the whole student.

    The block's incoming hidden states are replaced by the teacher's (detached, through the input projector), so the
    gradient ends at the block; masks, positions and caches stay the student's own.
    """

    kind = "blockwise"

    def __init__(self, alignments: Sequence[Alignment]) -> None:
        self.alignments, self.names = _own(alignments), alignment_names(alignments)

    @property
    def student_taps(self) -> list[Tap]:
        return _unique(map(student_output, self.alignments))

    @property
    def teacher_taps(self) -> list[Tap]:
        return _unique(tap for each in self.alignments for tap in (teacher_input(each), teacher_output(each)))

    def substitutions(
        self, signals: TeacherSignals, projectors: nn.ModuleList
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        return {
            alignment.student_module_name: _teacher_input_for(alignment, signals, projector)
            for alignment, projector in zip(self.alignments, projectors, strict=True)
        }

    def head_step(
        self, signals: TeacherSignals, positions: Positions, *, keep_logits: bool, task: FusedTask | None
    ) -> FusedStep | None:
        return None

    def terms(
        self, values: Mapping[Tap, Tensor], signals: TeacherSignals, projectors: nn.ModuleList, positions: Positions
    ) -> list[Term]:
        return feature_terms(self.alignments, self.names, values, signals, projectors, positions)


def logits_alignment(loss: object, loss_kwargs: Mapping[str, object] | None) -> Alignment:
    """Return the alignment of the two models' logits."""
    return Alignment("", "", select_logits, select_logits, loss_function=loss, loss_function_kwargs=loss_kwargs)  # type: ignore[arg-type]


def _teacher_input_for(
    alignment: Alignment, signals: TeacherSignals, projector: nn.Module
) -> Callable[[Tensor], Tensor]:
    # Kept, since recomputation under activation checkpointing asks again when the teacher run is closed.
    teacher: list[Tensor] = []

    def replace(hidden: Tensor) -> Tensor:
        if not teacher:
            teacher.append(signals.take(teacher_input(alignment)).detach().to(hidden.device))
        return projector.project_input(teacher[0]).to(hidden.dtype)  # type: ignore[operator]

    return replace


def _own(alignments: Sequence[Alignment]) -> list[Alignment]:
    """Copy, so that what the user changed since creation counts and nothing of the user's is changed."""
    return [dataclasses.replace(alignment) for alignment in alignments]


def _unique(taps: object) -> list[Tap]:
    return list(dict.fromkeys(taps))  # type: ignore[call-overload]

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

    def substitutions(
        self, signals: TeacherSignals, projectors: nn.ModuleList
    ) -> dict[str, Callable[[Tensor], Tensor]]:
        """Return, by student module, what replaces the hidden states it would take in."""
        return {}

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
        if self.heads is None:
            return None
        alignment, name = self.alignments[self._at_head], self.names[self._at_head]
        return FusedStep(name, alignment, self.heads, signals, positions, keep_logits=keep_logits, task=task)

    def terms(
        self, values: Mapping[Tap, Tensor], signals: TeacherSignals, projectors: nn.ModuleList, positions: Positions
    ) -> list[Term]:
        """Return the loss terms of a batch from the recorded student values, without that of :meth:`head_step`."""
        chosen = [index for index in range(len(self.alignments)) if self.heads is None or index != self._at_head]
        return feature_terms(
            [self.alignments[index] for index in chosen],
            [self.names[index] for index in chosen],
            values,
            signals,
            [projectors[index] for index in chosen],
            positions,
        )

    @property
    def _at_head(self) -> int:
        """Index of the alignment that ``heads`` belong to."""
        assert self.heads is not None
        modules = [alignment.student_module_name for alignment in self.alignments]
        return modules.index(self.heads.student.module)


class HolisticObjective(Objective):
    """All aligned modules learn together in the student's own forward; gradients flow through the whole student.

    Args:
        alignments: of the run.
        heads: of both models, where the loss of the alignment of the two is computed from what they take in.
    """

    kind = "holistic"

    def __init__(self, alignments: Sequence[Alignment], heads: FusedHeads | None = None) -> None:
        self.alignments, self.names, self.heads = _own(alignments), alignment_names(alignments), heads

    @property
    def student_taps(self) -> list[Tap]:
        taps = list(map(student_output, self.alignments))
        if self.heads is not None:
            taps[self._at_head] = self.heads.student_tap
        return _unique(taps)

    @property
    def teacher_taps(self) -> list[Tap]:
        taps = list(map(teacher_output, self.alignments))
        if self.heads is not None:
            taps[self._at_head] = self.heads.teacher_tap
        return _unique(taps)

    def with_heads(self, heads: FusedHeads) -> "HolisticObjective":
        """Return the same, one loss of which is computed from what the heads take in."""
        return type(self)(self.alignments, heads)


class ResponseObjective(HolisticObjective):
    """The student's logits learn from the teacher's (Hinton et al., "Distilling the Knowledge in a Neural Network").

    Args:
        alignments: the one of the logits.
        heads: as for :class:`HolisticObjective`.
    """

    kind = "response_based"

    @property
    def _at_head(self) -> int:
        return 0


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

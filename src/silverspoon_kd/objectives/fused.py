"""Losses on logits in the place of the student's head, so that nobody makes the logits of a whole batch."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.capture import Tap, find_module, forward_replaced
from silverspoon_kd.capture.head_form import HeadForm, head_tensors
from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import OutputHead, TaskLabels, fused_divergence, fused_task_and_divergence
from silverspoon_kd.objectives.positions import Positions
from silverspoon_kd.objectives.terms import Counts, TeacherSignals, Term, mask_for


@dataclass(frozen=True)
class FusedHeads:
    """The heads of both models.

    Attributes:
        student: of the student.
        teacher: of the teacher.
        teacher_head: its matrix and bias; None until the teacher is placed.
    """

    student: HeadForm
    teacher: HeadForm
    teacher_head: OutputHead | None = None

    @property
    def student_tap(self) -> Tap:
        """What the student's head gives out: its logits, or what a step puts in their place."""
        return Tap(self.student.module, "output")

    @property
    def teacher_tap(self) -> Tap:
        """The hidden states that the teacher's head takes in."""
        return Tap(self.teacher.module, "input")

    def of_modules(self) -> "FusedHeads":
        """Return the same for what the two modules give out, before the models scale and cap it."""
        return replace(self, student=HeadForm(self.student.module), teacher=HeadForm(self.teacher.module))

    def with_teacher(self, weight: Tensor, bias: Tensor | None) -> "FusedHeads":
        """Return the same with the teacher's matrix ``[vocabulary, hidden]`` and bias, on the student's device."""
        return replace(self, teacher_head=OutputHead(weight, bias, self.teacher.scale, self.teacher.soft_cap))


@dataclass(frozen=True)
class FusedTask:
    """The student's own loss, the cross entropy of its logits.

    Attributes:
        labels: integers ``[batch, length]``, of the token that each position is to predict; -100 for none.
        alpha: its share, 0..1.
        counts: positions in the whole step.
    """

    labels: Tensor
    alpha: float
    counts: Counts

    def weighted(self, weight: float, unit: str) -> TaskLabels:
        """Return the labels and the factors of both sums in the loss; ``weight`` and ``unit`` are the other term's."""
        ours, theirs = (self.counts.scale / self.counts.of(each).float() for each in ("task", unit))
        return TaskLabels(self.labels, (1 - self.alpha) * weight * theirs, self.alpha * ours)


@final
class FusedStep:
    """The losses of one batch, computed where the student's head would make the logits.

    The sum leaves the student as what its head gives out, since only for what a module returns do wrappers that share
    out its weights have them there in the backward.

    Args:
        name: of the term.
        alignment: of the logits.
        heads: of both models.
        signals: the teacher's hidden states.
        positions: what counts in this batch.
        keep_logits: the head gives out its logits all the same; only without gradients.
        task: the student's own loss; None: it is not asked for.
    """

    def __init__(
        self,
        name: str,
        alignment: Alignment,
        heads: FusedHeads,
        signals: TeacherSignals,
        positions: Positions,
        *,
        keep_logits: bool,
        task: FusedTask | None,
    ) -> None:
        self._name, self._alignment, self._heads = name, alignment, heads
        self._signals, self._positions, self._task = signals, positions, task
        self.keeps_logits = keep_logits and not torch.is_grad_enabled()
        self.has_task = task is not None
        self._terms: list[Term] = []

    def in_place(self, student: nn.Module) -> AbstractContextManager[None]:
        """Put this in the place of the head's forward while the block runs."""
        head: Any = find_module(student, self._heads.student.module)
        return forward_replaced(head, partial(self._forward, head, head.forward))

    def terms(self, values: Mapping[Tap, Tensor]) -> tuple[list[Term], Term | None, Tensor | None]:
        """Return the divergence, the task and the loss of both, from the recorded student values.

        With a task the gradient enters by that loss, which is None otherwise and where logits are kept.
        """
        assert self._terms, "the student's head runs in every forward"
        (term, *task), self._terms = self._terms, []
        if self.keeps_logits:
            return [term], next(iter(task), None), None
        total = values[self._heads.student_tap].sum()
        return ([term], task[0], total) if task else ([replace(term, total=total)], None, None)

    def _forward(self, head: nn.Module, own_forward: Any, hidden: Tensor) -> Tensor:
        form, teacher_head = self._heads.student, self._heads.teacher_head
        assert teacher_head is not None, "heads are bound when the teacher is placed"
        teacher = self._signals.take(self._heads.teacher_tap).to(hidden.device)
        # Read here, where wrappers have gathered it.
        student_head = OutputHead(*head_tensors(head), form.scale, form.soft_cap)
        try:
            total = self._total(hidden, student_head, teacher, teacher_head)
        except LossError as error:
            raise LossError(f"Alignment {self._name!r}: {error}") from error
        return own_forward(hidden) if self.keeps_logits else total.view(1, 1, 1)

    def _total(self, hidden: Tensor, head: OutputHead, teacher: Tensor, teacher_head: OutputHead) -> Tensor:
        """Return what gradients are made of, and keep the terms."""
        loss: Any = self._alignment.loss
        weight = self._alignment.loss_weight
        mask, unit = mask_for(hidden, self._alignment, self._positions)
        # A mean over positions without a mask, counted in rows.
        part = self._positions.rows / max(hidden[..., 0].numel(), 1) if unit == "rows" else 1.0
        if self._task is None:
            total = fused_divergence(loss, hidden, head, teacher, teacher_head, mask).total * part
            self._terms = [Term(self._name, total, unit, weight)]
            return total
        task = self._task.weighted(weight * part, unit)
        found = fused_task_and_divergence(loss, hidden, head, teacher, teacher_head, mask, task)
        self._terms = [
            Term(self._name, found.divergence.total * part, unit, weight),
            Term("task", found.task, "task"),
        ]
        return found.combined

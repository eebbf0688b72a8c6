"""Losses on logits in the place of the student's head, so that nobody makes the logits of a whole batch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.capture import Tap, find_module
from silverspoon_kd.capture.head_form import HeadForm
from silverspoon_kd.errors import LossError
from silverspoon_kd.losses import OutputHead, fused_divergence
from silverspoon_kd.objectives.positions import Positions
from silverspoon_kd.objectives.terms import TeacherSignals, Term, mask_for


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

    def with_teacher(self, weight: Tensor, bias: Tensor | None) -> "FusedHeads":
        """Return the same with the teacher's matrix ``[vocabulary, hidden]`` and bias, on the student's device."""
        return replace(self, teacher_head=OutputHead(weight, bias, self.teacher.scale, self.teacher.soft_cap))


@final
class FusedStep:
    """The loss of one batch, computed where the student's head would make the logits.

    The sum leaves the student as what its head gives out, since only for what a module returns do wrappers that share
    out its weights have them there in the backward.

    Args:
        name: of the term.
        alignment: of the logits.
        heads: of both models.
        signals: the teacher's hidden states.
        positions: what counts in this batch.
        keep_logits: the head gives out its logits all the same; only without gradients.
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
    ) -> None:
        self._name, self._alignment, self._heads = name, alignment, heads
        self._signals, self._positions = signals, positions
        self.keeps_logits = keep_logits and not torch.is_grad_enabled()
        self._made: Term | None = None

    @contextmanager
    def in_place(self, student: nn.Module) -> Iterator[None]:
        """Put this in the place of the head's forward while the block runs; hooks of wrappers still run around it."""
        head: Any = find_module(student, self._heads.student.module)
        before = vars(head).get("forward")
        head.forward = partial(self._forward, head, head.forward)
        try:
            yield
        finally:
            del head.forward
            if before is not None:
                head.forward = before

    def terms(self, values: Mapping[Tap, Tensor]) -> list[Term]:
        """Return the loss terms of the batch, from the recorded student values."""
        assert self._made is not None, "the student's head runs in every forward"
        term, self._made = self._made, None
        return [term if self.keeps_logits else replace(term, total=values[self._heads.student_tap].sum())]

    def _forward(self, head: nn.Linear, own_forward: Any, hidden: Tensor) -> Tensor:
        form, teacher_head = self._heads.student, self._heads.teacher_head
        assert teacher_head is not None, "heads are bound when the teacher is placed"
        teacher = self._signals.take(self._heads.teacher_tap).to(hidden.device)
        mask, unit = mask_for(hidden, self._alignment, self._positions)
        try:
            value = fused_divergence(
                self._alignment.loss,  # type: ignore[arg-type]
                hidden,
                # Read here, where wrappers have gathered it.
                OutputHead(head.weight, head.bias, form.scale, form.soft_cap),
                teacher,
                teacher_head,
                mask,
            )
        except LossError as error:
            raise LossError(f"Alignment {self._name!r}: {error}") from error
        total = value.total
        if unit == "rows":
            total = total / value.count.clamp(min=1) * self._positions.rows
        self._made = Term(name=self._name, total=total, unit=unit, weight=self._alignment.loss_weight)
        return own_forward(hidden) if self.keeps_logits else total.view(1, 1, 1)

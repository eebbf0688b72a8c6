"""The one module that is wrapped and trained."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.hooks import RemovableHandle

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of, select_logits
from silverspoon_kd.objectives import (
    Counts,
    FusedTask,
    Objective,
    Positions,
    TeacherSignals,
    Term,
    combine,
    conventions_of,
    positions_of,
)
from silverspoon_kd.projectors import AlignmentProjectors
from silverspoon_kd.student.task_loss import task_inputs, task_term


@dataclass(frozen=True)
class StepOptions:
    """The plain numbers of a step.

    Attributes:
        alpha: share of the student's own loss, 0..1.
        magnitude_aware: divide each term by its detached size.
        label_smoothing: of the student's own loss.
        end_to_end: evaluation also computes the student's own loss without any substitution.
    """

    alpha: float = 0.0
    magnitude_aware: bool = False
    label_smoothing: float = 0.0
    end_to_end: bool = False


class StudentRoot(nn.Module):
    """Student, projectors and objective; one forward is one distillation step.

    Whatever wraps a model (DDP, FSDP, ZeRO, autocast) wraps this one, and every loss is computed inside its forward, so
    nothing has to be unwrapped or repaired. The teacher is not part of it.
    """

    accepts_loss_kwargs = True

    def __init__(
        self,
        student: nn.Module,
        objective: Objective,
        projectors: list[AlignmentProjectors],
        trace: Trace,
        options: StepOptions,
    ) -> None:
        super().__init__()
        self.student = student
        self.projectors = nn.ModuleList(projectors)
        self.objective, self.options = objective, options
        self.view = InputView(student, "student")
        self.conventions = conventions_of(student)
        self._trace = trace
        self._kept: list[RemovableHandle] = []
        # For wrappers: told of the activations that gradients will enter the student by.
        self.before_backward: Callable[[Mapping[Tap, Tensor]], None] | None = None

    @property
    def config(self) -> Any:
        """The student's configuration; absent where the student has none."""
        return self.student.config

    @property
    def generation_config(self) -> Any:
        """The student's generation settings; absent where the student has none."""
        return self.student.generation_config

    @property
    def main_input_name(self) -> str:
        """The student's main input."""
        return getattr(base_of(self.student), "main_input_name", "input_ids")

    @property
    def _no_split_modules(self) -> Any:
        return getattr(base_of(self.student), "_no_split_modules", None)

    def forward(
        self,
        batch: Mapping[str, Any],
        signals: TeacherSignals,
        counts: Counts,
        want_output: bool = False,
    ) -> dict[str, Any]:
        """Run one step.

        Args:
            batch: the student's batch, with labels where there are any.
            signals: the teacher's activations of the same batch.
            counts: positions in the whole step.
            want_output: also return the student's own logits.

        Returns:
            "loss" (scalar, fp32), "parts" (detached values by term) and, on request, "logits".
        """
        self.release()
        positions = positions_of(batch, self.conventions)
        replace = self.objective.substitutions(signals, self.projectors)
        capture = Capture(self.student, self.objective.student_taps, self._trace, replace)
        step = self.objective.head_step(
            signals, positions, keep_logits=want_output, task=self._fused_task(batch, counts)
        )
        # What is left of the student's own loss for its own forward.
        with_task = self.options.alpha > 0 and not (step is not None and step.has_task)
        own_output = want_output and not replace and (step is None or step.keeps_logits)
        inputs = self._inputs(batch, positions, with_task)
        with nullcontext() if step is None else step.in_place(self.student):
            output, self._kept = capture.run(lambda: self.student(**inputs), may_stop=not (with_task or own_output))
        if self.before_backward is not None:
            self.before_backward(capture.values)
        of_head, task, whole = ([], None, None) if step is None else step.terms(capture.values)
        terms = self.objective.terms(capture.values, signals, self.projectors, positions)
        if with_task:
            task = self._task(output, batch, positions)
        loss, parts = self._combine([*terms, *of_head], task, counts)
        if whole is not None:  # where gradients enter that of the head
            loss = whole + self._combine(terms, None, counts)[0] if terms else whole
        result: dict[str, Any] = {"loss": loss, "parts": parts}
        if not torch.is_grad_enabled():
            self.release()
        if want_output:
            result["logits"] = self._logits(output, batch) if own_output else self._logits(None, batch)
        if self.options.end_to_end and not self.training:
            parts["end_to_end"] = self._end_to_end(batch, counts)
        return result

    def release(self) -> None:
        """Remove the hooks that a backward with recomputation still needed."""
        for handle in self._kept:
            handle.remove()
        self._kept = []

    def activation_checkpointing_enable(self, activation_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:
        """Enable it on the student; see the student's method."""
        self.student.activation_checkpointing_enable(  # type: ignore[operator]
            activation_checkpointing_kwargs=activation_checkpointing_kwargs, **kwargs
        )

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any = None, **kwargs: Any) -> None:
        """The name of :meth:`activation_checkpointing_enable` in older versions of transformers."""
        self.student.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs=gradient_checkpointing_kwargs, **kwargs
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the student's input embeddings."""
        return self.student.get_input_embeddings()  # type: ignore[operator]

    def num_parameters(self, exclude_embeddings: bool = False) -> int:
        """Return the number of the student's parameters, which the Trainer's count of operations is made from."""
        count = getattr(self.student, "num_parameters", None)
        if count is None:
            return sum(parameter.numel() for parameter in self.student.parameters())
        return count(exclude_embeddings=exclude_embeddings)

    def _inputs(self, batch: Mapping[str, Any], positions: Positions, with_task: bool) -> dict[str, Any]:
        inputs = self.view(batch, with_labels=with_task)
        if not with_task:
            return inputs
        return task_inputs(
            inputs, positions, smoothing=self.options.label_smoothing, takes_num_items=self.view.takes_num_items
        )

    def _fused_task(self, batch: Mapping[str, Any], counts: Counts) -> FusedTask | None:
        labels = batch.get("labels")
        if self.options.alpha == 0 or not isinstance(labels, Tensor):
            return None
        if self.conventions.shifts_labels:
            labels = functional.pad(labels[..., 1:], (0, 1), value=-100)
        return FusedTask(labels, self.options.alpha, counts)

    def _combine(self, terms: list[Term], task: Term | None, counts: Counts) -> tuple[Tensor, dict[str, Tensor]]:
        return combine(terms, task, counts, alpha=self.options.alpha, magnitude_aware=self.options.magnitude_aware)

    def _task(self, output: Any, batch: Mapping[str, Any], positions: Any) -> Term:
        return task_term(
            output,
            batch.get("labels"),
            positions,
            smoothing=self.options.label_smoothing,
            shifts=self.conventions.shifts_labels,
        )

    def _logits(self, output: Any, batch: Mapping[str, Any]) -> Tensor:
        if output is None:
            output = self.student(**self.view(batch))
        return select_logits(output).detach()

    def _end_to_end(self, batch: Mapping[str, Any], counts: Counts) -> Tensor:
        positions = positions_of(batch, self.conventions)
        inputs = task_inputs(
            self.view(batch, with_labels=True),
            positions,
            smoothing=0.0,
            takes_num_items=self.view.takes_num_items,
        )
        term = task_term(self.student(**inputs), None, positions, smoothing=0.0, shifts=self.conventions.shifts_labels)
        return (term.total.float() * (counts.scale / counts.of("task"))).detach()

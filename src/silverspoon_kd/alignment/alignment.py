"""The record of one alignment, and the list that remembers its two models."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from silverspoon_kd.capture import Selector
from silverspoon_kd.errors import AlignmentError
from silverspoon_kd.losses import Loss, get_loss_function
from silverspoon_kd.projectors import ProjectorInit


@dataclass
class Alignment:
    """One teacher module teaches one student module.

    Attributes:
        teacher_module_name: dotted name in the teacher; "" is the whole model.
        student_module_name: dotted name in the student; "" is the whole model.
        teacher_output_selector: index, key or function that picks a tensor from the teacher module's output.
        student_output_selector: the same for the student module.
        input_projector: maps the teacher's input to the student's width (blockwise); None: made when needed.
        output_projector: maps the student's output to the teacher's width; None: made when needed.
        auto_projector: make missing projectors where widths differ; False: differing widths are an error.
        projector_init: None, "normal" (std 0.02), "xavier", or a function of the projector.
        loss_function: a name of the registry, a :class:`~silverspoon_kd.losses.Loss`, or a callable
            ``(student, teacher) -> scalar``; None: "mse".
        loss_function_kwargs: arguments of a named loss.
        loss_weight: factor of this term in the sum of all terms.
        learning_rate: None: from ``TrainingArguments``; so are the following.
        weight_decay: decoupled weight decay.
        optimizer: a name of ``TrainingArguments.optim`` or a factory of parameter groups.
        scheduler: a name of ``TrainingArguments.lr_scheduler_type`` or a factory.
        max_grad_norm: limit of the 2-norm of this alignment's own gradient; 0 disables.
    """

    teacher_module_name: str
    student_module_name: str
    teacher_output_selector: Selector = None
    student_output_selector: Selector = None
    input_projector: nn.Module | None = None
    output_projector: nn.Module | None = None
    auto_projector: bool = True
    projector_init: ProjectorInit = None
    loss_function: str | Loss | Callable[..., Any] | None = None
    loss_function_kwargs: Mapping[str, Any] | None = None
    loss_weight: float = 1.0
    learning_rate: float | None = None
    weight_decay: float | None = None
    optimizer: str | Callable[..., Any] | None = None
    scheduler: str | Callable[..., Any] | None = None
    max_grad_norm: float | None = None
    loss: Loss = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.loss = get_loss_function(self.loss_function or "mse", **(self.loss_function_kwargs or {}))
        if self.loss_weight < 0:
            raise AlignmentError(f"loss_weight={self.loss_weight} of {self.student_module_name!r} is negative.")
        for name in ("learning_rate", "weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise AlignmentError(f"{name}={value} of {self.student_module_name!r} is negative.")


class AlignmentList(list[Alignment]):
    """Alignments and the two models they were made for; lists of several calls are added up with ``+``.

    Attributes:
        teacher: the teacher as given to :func:`create_alignments` (a module, or a model id).
        student: the student as given.
    """

    def __init__(self, alignments: Iterable[Alignment], teacher: Any, student: Any) -> None:
        super().__init__(alignments)
        self.teacher = teacher
        self.student = student

    def __add__(self, other: list[Alignment]) -> "AlignmentList":  # type: ignore[override]
        if isinstance(other, AlignmentList) and (
            other.teacher is not self.teacher or other.student is not self.student
        ):
            raise AlignmentError(
                "Two lists of alignments were added that were made for different models. Pass the same teacher_model "
                "and student_model to both create_alignments calls."
            )
        return AlignmentList([*self, *other], self.teacher, self.student)


def alignment_names(alignments: Iterable[Alignment]) -> list[str]:
    """Return one name each for logs and groups: the student module's, with the loss or a number added if needed."""
    alignments = list(alignments)
    plain = [alignment.student_module_name or "logits" for alignment in alignments]
    names: list[str] = []
    for name, alignment in zip(plain, alignments, strict=True):
        if plain.count(name) > 1:
            name = f"{name}:{alignment.loss.name}"
        base, number = name, 2
        while name in names:
            name, number = f"{base}#{number}", number + 1
        names.append(name)
    return names

"""From a student, a teacher and an objective to the root that is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of, find_module
from silverspoon_kd.capture.probe import example_inputs, probe
from silverspoon_kd.errors import AlignmentError, ConfigurationError, DataError
from silverspoon_kd.objectives import Objective
from silverspoon_kd.objectives.terms import student_output, teacher_input, teacher_output
from silverspoon_kd.optim import STUDENT_GROUP, GroupSpec
from silverspoon_kd.projectors import AlignmentProjectors
from silverspoon_kd.projectors.build import projector_between
from silverspoon_kd.student import StepOptions, StudentRoot, reached_parameters
from silverspoon_kd.tree import tensors_in


@dataclass(frozen=True)
class Assembly:
    """A root ready to be wrapped.

    Attributes:
        root: what is trained.
        teacher_trace: what is known of the teacher's forward.
        trainable: names of the root's parameters that can get a gradient.
    """

    root: StudentRoot
    teacher_trace: Trace
    trainable: set[str]


def assemble(
    student: nn.Module,
    teacher: nn.Module,
    objective: Objective,
    options: StepOptions,
    *,
    student_example: Mapping[str, Any] | None,
    teacher_example: Mapping[str, Any] | None,
    seed: int,
) -> Assembly:
    """Find shapes, make projectors, and find out what can be trained; all before any wrapping.

    Args:
        student: the student.
        teacher: the frozen teacher.
        objective: what is computed.
        options: of the step.
        student_example: a tiny batch as the student gets it, used where the model's config says too little.
        teacher_example: the same for the teacher.
        seed: for the projectors, so that all ranks make the same ones without touching the run's random numbers.

    Raises:
        AlignmentError: a module is unknown, outputs are no tensors, or widths differ without a projector.
        DataError: there is nothing to find the shapes with.
    """
    _check_modules(student, teacher, objective.alignments)
    _bind_heads(teacher, objective.alignments)
    teacher_trace, student_trace = Trace(), Trace()
    teacher_values = _probe_teacher(teacher, objective.teacher_taps, teacher_trace, teacher_example)
    seen: dict[str, Tensor] = {}
    (values, outputs), parameters = _probe_student(student, objective, student_trace, student_example, options, seen)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        projectors = [
            _projectors(alignment, values, teacher_values, seen.get(alignment.student_module_name))
            for alignment in objective.alignments
        ]
    root = StudentRoot(student, objective, projectors, student_trace, options)
    reached = reached_parameters([*values.values(), *outputs], parameters.values())
    trainable = {f"student.{name}" for name, tensor in parameters.items() if id(tensor) in reached}
    trainable |= {f"projectors.{name}" for name, _ in root.projectors.named_parameters()}
    return Assembly(root=root, teacher_trace=teacher_trace, trainable=trainable)


def owned_parameters(root: StudentRoot) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Divide the root's parameters among the alignments, innermost aligned module first; the rest is the student's."""
    objective = root.objective
    owner: dict[int, str] = {}
    order = sorted(
        range(len(objective.names)), key=lambda i: objective.alignments[i].student_module_name.count("."), reverse=True
    )
    for index in order:
        module_name = objective.alignments[index].student_module_name
        own = list(root.projectors[index].parameters())
        own += list(find_module(root.student, module_name).parameters()) if module_name else []
        for parameter in own:
            owner.setdefault(id(parameter), objective.names[index])
    owned: dict[str, list[tuple[str, nn.Parameter]]] = {
        name: [] for name, each in zip(objective.names, objective.alignments, strict=True) if each.student_module_name
    }
    owned[STUDENT_GROUP] = []
    for name, parameter in root.named_parameters():
        owned[owner.get(id(parameter), STUDENT_GROUP)].append((name, parameter))
    return owned


def check_optimizer(optimizer: torch.optim.Optimizer | None, root: StudentRoot) -> None:
    """Refuse an optimizer that the user built for another model.

    Raises:
        ConfigurationError: it holds parameters that are not the root's.
    """
    own = {id(parameter) for parameter in root.parameters()}
    groups = [] if optimizer is None else optimizer.param_groups
    if any(id(parameter) not in own for group in groups for parameter in group["params"]):
        raise ConfigurationError(
            "The optimizer given in optimizers= holds parameters that are not the student's or its projectors'. Build "
            "it from the student, or leave it to the distiller."
        )


def group_specs(objective: Objective) -> dict[str, GroupSpec]:
    """Return what each alignment wants for its own parameters."""
    return {
        name: GroupSpec(
            name=name,
            learning_rate=each.learning_rate,
            weight_decay=each.weight_decay,
            max_grad_norm=each.max_grad_norm,
            optimizer=each.optimizer,
            scheduler=each.scheduler,
        )
        for name, each in zip(objective.names, objective.alignments, strict=True)
        if each.student_module_name
    }


def _check_modules(student: nn.Module, teacher: nn.Module, alignments: Sequence[Alignment]) -> None:
    if not alignments:
        raise AlignmentError("There are no alignments, so nothing would be learnt. Make some with create_alignments.")
    for alignment in alignments:
        find_module(teacher, alignment.teacher_module_name)
        find_module(student, alignment.student_module_name)


def _bind_heads(teacher: nn.Module, alignments: Sequence[Alignment]) -> None:
    for alignment in alignments:
        if alignment.loss.needs_head:
            head = getattr(base_of(teacher), "get_output_embeddings", lambda: None)()
            if head is None:
                raise AlignmentError(
                    f"The loss {alignment.loss.name!r} needs the teacher's output embeddings, which "
                    f"{type(base_of(teacher)).__name__} does not have. Use another loss."
                )
            alignment.loss = alignment.loss.with_head(head.weight.detach())  # type: ignore[attr-defined]


def _inputs_for(
    model: nn.Module, example: Mapping[str, Any] | None, role: str, *, with_labels: bool = False
) -> Mapping[str, Any]:
    inputs = example_inputs(model)
    if inputs is None and example is not None:
        inputs = InputView(model, role)(example, with_labels=with_labels)
    if inputs is None:
        raise DataError(
            f"The shapes of the {role} {type(base_of(model)).__name__} cannot be found without data. Pass a "
            "train_dataset or an eval_dataset."
        )
    return inputs


def _probe_teacher(
    teacher: nn.Module, taps: Sequence[Tap], trace: Trace, example: Mapping[str, Any] | None
) -> dict[Tap, Tensor]:
    def call(forward: Callable[[], Any]) -> dict[Tap, Tensor]:
        capture = Capture(teacher, taps, trace)
        with torch.no_grad():
            capture.run(forward, may_stop=False)
        return capture.values

    return probe(teacher, _inputs_for(teacher, example, "teacher"), call)[0]


def _probe_student(
    student: nn.Module,
    objective: Objective,
    trace: Trace,
    example: Mapping[str, Any] | None,
    options: StepOptions,
    seen: dict[str, Tensor],
) -> tuple[tuple[dict[Tap, Tensor], list[Tensor]], dict[str, Tensor]]:
    """Return the student's values, all outputs that the task loss can depend on, and the parameters behind them."""
    cut = [each.student_module_name for each in objective.alignments] if objective.kind == "blockwise" else []

    def cutting(name: str) -> Callable[[Tensor], Tensor]:
        def replace(hidden: Tensor) -> Tensor:
            seen[name] = hidden
            return hidden.detach()

        return replace

    def call(forward: Callable[[], Any]) -> tuple[dict[Tap, Tensor], list[Tensor]]:
        capture = Capture(student, objective.student_taps, trace, {name: cutting(name) for name in cut})
        output, kept = capture.run(forward, may_stop=False)
        for handle in kept:
            handle.remove()
        return capture.values, list(tensors_in(output)) if options.alpha > 0 else []

    return probe(student, _inputs_for(student, example, "student", with_labels=options.alpha > 0), call)


def _projectors(
    alignment: Alignment,
    student: Mapping[Tap, Tensor],
    teacher: Mapping[Tap, Tensor],
    student_input: Tensor | None,
) -> AlignmentProjectors:
    source, target = student[student_output(alignment)], teacher[teacher_output(alignment)]
    output_projector, input_projector = alignment.output_projector, alignment.input_projector
    # Logits are compared on their common vocabulary, attention maps have no width.
    has_width = alignment.loss.positions == "tokens" and alignment.loss.layout == "positions"
    if output_projector is None and has_width and alignment.student_module_name:
        output_projector = _between(alignment, source, target, "output")
    if input_projector is None and student_input is not None:
        input_projector = _between(alignment, teacher[teacher_input(alignment)], student_input, "input")
    return AlignmentProjectors(input_projector, output_projector)


def _between(alignment: Alignment, source: Tensor, target: Tensor, side: str) -> nn.Module | None:
    projector = projector_between(source, target, alignment.projector_init)
    if projector is not None and not alignment.auto_projector:
        raise AlignmentError(
            f"The {side} of {alignment.student_module_name!r} (student) and {alignment.teacher_module_name!r} "
            f"(teacher) have different widths: shapes {list(source.shape)} and {list(target.shape)}. Use "
            f"auto_projector=True, or give an {side}_projector."
        )
    return projector

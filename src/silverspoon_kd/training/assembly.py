"""From a student, a teacher and an objective to the root that is trained."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of, find_module
from silverspoon_kd.capture.probe import example_inputs, probe
from silverspoon_kd.capture.skipped import find_skipped
from silverspoon_kd.errors import AlignmentError, ConfigurationError, DataError
from silverspoon_kd.objectives import Objective
from silverspoon_kd.objectives.terms import student_output, teacher_input, teacher_output
from silverspoon_kd.optim import STUDENT_GROUP, GroupSpec
from silverspoon_kd.projectors import AlignmentProjectors
from silverspoon_kd.projectors.build import projector_between
from silverspoon_kd.student import StepOptions, StudentRoot, reached_parameters
from silverspoon_kd.teacher import TeacherFacts
from silverspoon_kd.tree import tensors_in


@dataclass(frozen=True)
class Assembly:
    """A root ready to be wrapped.

    Attributes:
        root: what is trained.
        trainable: names of the root's parameters that can get a gradient.
    """

    root: StudentRoot
    trainable: set[str]


def assemble(
    student: nn.Module,
    objective: Objective,
    options: StepOptions,
    teacher_values: Mapping[Tap, Tensor],
    *,
    example: Mapping[str, Any] | None,
    seed: int,
) -> Assembly:
    """Make projectors and find out what can be trained; all before any wrapping.

    Args:
        student: the student.
        objective: what is computed.
        options: of the step.
        teacher_values: shapes and dtypes of the teacher's activations.
        example: a tiny batch as the student gets it, used where the model's config says too little.
        seed: for the projectors, so that all ranks make the same ones without touching the run's random numbers.

    Raises:
        AlignmentError: outputs are no tensors, or widths differ without a projector.
        DataError: there is nothing to find the shapes with.
    """
    trace, seen = Trace(), dict[str, Tensor]()
    inputs = probe_inputs(student, example, "student", with_labels=options.alpha > 0)
    (values, outputs), parameters = _probe_student(student, objective, trace, inputs, options, seen)
    if options.alpha == 0:
        trace.skipped = find_skipped(student, _cut_blocks(objective), objective.student_taps, trace, inputs)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        projectors = [
            _projectors(alignment, values, teacher_values, seen.get(alignment.student_module_name))
            for alignment in objective.alignments
        ]
    root = StudentRoot(student, objective, projectors, trace, options)
    reached = reached_parameters([*values.values(), *outputs], parameters.values())
    trainable = {f"student.{name}" for name, tensor in parameters.items() if id(tensor) in reached}
    trainable |= {f"projectors.{name}" for name, _ in root.projectors.named_parameters()}
    return Assembly(root=root, trainable=trainable)


def check_modules(student: nn.Module, teacher: nn.Module | None, alignments: Sequence[Alignment]) -> None:
    """Refuse alignments of modules that are not there.

    Args:
        student: the student.
        teacher: the teacher; None where it is in other processes, which look themselves.
        alignments: of the run.

    Raises:
        AlignmentError: there are none, or a module is missing.
    """
    if not alignments:
        raise AlignmentError("There are no alignments, so nothing would be learnt. Make some with create_alignments.")
    for alignment in alignments:
        find_module(student, alignment.student_module_name)
        if teacher is not None:
            find_module(teacher, alignment.teacher_module_name)


def need_heads(alignments: Sequence[Alignment]) -> bool:
    """Tell whether a loss asks for the teacher's output head."""
    return any(alignment.loss.needs_head for alignment in alignments)


def bind_heads(facts: TeacherFacts, alignments: Sequence[Alignment], device: torch.device) -> None:
    """Give the teacher's output head to the losses that need it, on the student's device and once for all of them.

    Raises:
        AlignmentError: the teacher has none.
    """
    losses = [alignment for alignment in alignments if alignment.loss.needs_head]
    if losses and facts.head is None:
        raise AlignmentError(
            f"The loss {losses[0].loss.name!r} needs the matrix of the teacher's output embeddings, but "
            f"{facts.class_name} has none, or has quantised or offloaded it. Use another loss."
        )
    if not losses or facts.head is None:
        return
    weight = facts.head.weight.detach()
    weight = weight if weight.device.type == device.type == "cpu" else weight.to(device)
    for alignment in losses:
        alignment.loss = alignment.loss.with_head(weight)  # type: ignore[attr-defined]


def probe_inputs(
    model: nn.Module, example: Mapping[str, Any] | None, role: str, *, with_labels: bool = False
) -> Mapping[str, Any]:
    """Return a tiny batch for a model: made from its config, else the example.

    Raises:
        DataError: there is neither.
    """
    inputs = example_inputs(model)
    if inputs is None and example is not None:
        inputs = InputView(model, role)(example, with_labels=with_labels)
    if inputs is None:
        raise DataError(
            f"The shapes of the {role} {type(base_of(model)).__name__} cannot be found without data. Pass a "
            "train_dataset or an eval_dataset."
        )
    return inputs


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


def check_optimizer(optimizer: torch.optim.Optimizer | None, root: StudentRoot, student_mode: str) -> None:
    """Refuse an optimizer that the user built for another model.

    Raises:
        ConfigurationError: it holds parameters that are not the root's, or that will be replaced by shards.
    """
    if optimizer is not None and student_mode not in ("single", "ddp"):
        raise ConfigurationError(
            f"The optimizer given in optimizers= holds whole parameters, and "
            f"{'FSDP' if student_mode == 'fsdp' else 'DeepSpeed'} puts shards in their place, which it would never "
            "update. Choose it with optim=."
        )
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


def _probe_student(
    student: nn.Module,
    objective: Objective,
    trace: Trace,
    inputs: Mapping[str, Any],
    options: StepOptions,
    seen: dict[str, Tensor],
) -> tuple[tuple[dict[Tap, Tensor], list[Tensor]], dict[str, Tensor]]:
    """Return the student's values, all outputs that the task loss can depend on, and the parameters behind them."""
    cut = _cut_blocks(objective)

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

    return probe(student, inputs, call)


def _cut_blocks(objective: Objective) -> list[str]:
    """Return the student's modules that get their input from the teacher."""
    return [each.student_module_name for each in objective.alignments] if objective.kind == "blockwise" else []


def _projectors(
    alignment: Alignment,
    student: Mapping[Tap, Tensor],
    teacher: Mapping[Tap, Tensor],
    student_input: Tensor | None,
) -> AlignmentProjectors:
    output_projector, input_projector = alignment.output_projector, alignment.input_projector
    # Logits are compared on their common vocabulary, attention maps have no width.
    has_width = alignment.loss.positions == "tokens" and alignment.loss.layout == "positions"
    if output_projector is None and has_width and alignment.student_module_name:
        source, target = student[student_output(alignment)], teacher[teacher_output(alignment)]
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

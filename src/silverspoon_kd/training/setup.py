"""From what the user gave to a root that can be trained and a teacher that answers, before the Trainer is set up."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.capture import InputView, base_of
from silverspoon_kd.capture.head_form import HeadForm
from silverspoon_kd.distributed import TeacherPlacement
from silverspoon_kd.distributed.plan import Plan
from silverspoon_kd.distributed.split_gpu import require_split_done
from silverspoon_kd.errors import PlacementError
from silverspoon_kd.objectives import Objective
from silverspoon_kd.student import StepOptions, StudentRoot
from silverspoon_kd.teacher import (
    DedicatedTeacher,
    PreparedTeacher,
    TeacherBesideStudent,
    TeacherExecutor,
    check_loaded,
    check_not_quantised,
    check_separate,
    load_model,
    shares_base,
    start_world,
)
from silverspoon_kd.training.arguments import TrainingArguments
from silverspoon_kd.training.assembly import (
    assemble,
    bind_heads,
    check_modules,
    check_optimizer,
    group_specs,
    need_heads,
    probe_inputs,
)
from silverspoon_kd.training.columns import Prepare, checked_examples, example_batch, label_columns, used_columns
from silverspoon_kd.training.deepspeed import check_alignments, gather_for_good, made_whole
from silverspoon_kd.training.fused import alignment_of_logits, bind_teacher_head, settle, student_form
from silverspoon_kd.training.memory import plan_with_memory, rows_of_a_batch, tell
from silverspoon_kd.training.run_arguments import autocast_dtype, run_plan
from silverspoon_kd.training.vocabulary import check_tokenizers, check_vocabularies

TeacherSource = nn.Module | str | Callable[[], nn.Module]


@dataclass(frozen=True)
class Request:
    """What a distiller was asked for; ``args`` is the run's own copy, ``options`` come from the user's."""

    student: nn.Module
    teacher: TeacherSource
    objective: Objective
    args: TrainingArguments
    options: StepOptions
    train_dataset: Any
    eval_dataset: Any
    data_collator: Callable[[list[Any]], Any] | None
    processing_class: Any
    prepare_teacher: Prepare | None
    prepare_student: Prepare | None
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True)
class Setup:
    """What the Trainer is set up with.

    Attributes:
        plan: what will run.
        objective: what is computed, and how.
        root: what is trained.
        trainable: names of the root's parameters that can get a gradient.
        executor: the placed teacher.
        teacher: the teacher's module where this process has one.
        labels: names of the label columns.
        columns: columns to keep of a data set; None: all.
    """

    plan: Plan
    objective: Objective
    root: StudentRoot
    trainable: set[str]
    executor: TeacherExecutor
    teacher: nn.Module | None
    labels: list[str]
    columns: list[str] | None


def set_up(request: Request) -> Setup:
    """Check everything that can be checked, find shapes, make projectors, place the teacher.

    Raises:
        ConfigurationError: models, alignments, data and arguments do not fit.
    """
    args, given = request.args, request.teacher
    plan = run_plan(args, request.objective.kind)
    dedicated = isinstance(args.teacher_placement, TeacherPlacement)
    if args.deepspeed:
        check_alignments(args, group_specs(request.objective))
    if args.teacher_placement == "sharded":
        check_not_quantised(given, "teacher_placement='sharded'")
    with made_whole():
        teacher = load_model(given, "teacher") if isinstance(given, nn.Module) or not dedicated else None
    for model in (teacher, None if plan.student_mode == "deepspeed-3" else request.student):
        if model is not None:
            gather_for_good(model)
    _check_models(request, teacher)
    labels = label_columns(request.student, args.label_names)
    # Nobody can tell which columns the user's functions read.
    known = args.remove_unused_columns and not (request.prepare_teacher or request.prepare_student)
    columns = used_columns(request.student, _columns_of(teacher), labels) if known else None
    examples = _examples(request, teacher, columns)
    form = _student_form(request, teacher, plan, examples[0])
    logits = _teachers_logits(request, form)
    if dedicated:
        prepared = _dedicated(request, examples[1], logits)
    else:
        prepared = _beside_the_student(request, teacher, examples[1], logits, overlap=plan.overlap)
    try:
        objective, plan = settle(request.objective, form, prepared.facts, plan, args)
        if request.prepare_teacher is None:
            check_vocabularies(request.student, prepared.facts.vocab_size)
        assembly = assemble(
            request.student,
            objective,
            request.options,
            prepared.facts.values,
            example=examples[0],
            seed=args.seed,
        )
        check_optimizer(request.optimizer, assembly.root, plan.student_mode)
        columns = used_columns(request.student, prepared.facts.columns, labels) if known else None
        noted = len(plan.notes)
        plan = plan_with_memory(plan, prepared.facts, assembly.root, assembly.trainable, args)
        tell(plan, args, noted)
        executor = prepared.place()
        # Beside the student the head has moved with the teacher.
        bind_heads(prepared.facts, objective.alignments, args.device)
        bind_teacher_head(objective, prepared.facts, args.device)
    except BaseException:
        prepared.abandon()
        raise
    return Setup(plan, objective, assembly.root, assembly.trainable, executor, teacher, labels, columns)


def _student_form(
    request: Request, teacher: nn.Module | None, plan: Plan, example: Mapping[str, Any] | None
) -> HeadForm | str | None:
    return student_form(
        request.student,
        request.objective,
        request.options,
        request.args,
        example,
        student_mode=plan.student_mode,
        own_base=teacher is not None and shares_base(request.student, teacher),
    )


def _teachers_logits(request: Request, form: HeadForm | str | None) -> str | None:
    """Return the teacher's module whose output are logits that the student can do without, None if it cannot."""
    alignment = alignment_of_logits(request.objective, request.student)
    return alignment.teacher_module_name if isinstance(form, HeadForm) and isinstance(alignment, Alignment) else None


def _columns_of(teacher: nn.Module | None) -> list[str] | None:
    view = None if teacher is None else InputView(teacher, "teacher")
    return None if view is None or view.takes_everything else view.names


def _check_models(request: Request, teacher: nn.Module | None) -> None:
    check_modules(request.student, teacher, request.objective.alignments)
    if teacher is not None:
        if not shares_base(request.student, teacher):
            check_separate(request.student, teacher)
            check_loaded(teacher)
        if request.prepare_teacher is None:
            size = getattr(getattr(base_of(teacher), "config", None), "vocab_size", None)
            check_vocabularies(request.student, size)
    source = teacher if teacher is not None else request.teacher
    if request.prepare_teacher is None and isinstance(source, (nn.Module, str)):
        check_tokenizers(request.processing_class, source)


def _examples(
    request: Request, teacher: nn.Module | None, columns: list[str] | None
) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    make = partial(
        example_batch,
        collator=request.data_collator,
        processing_class=request.processing_class,
        student=request.student,
        columns=columns,
    )
    alpha, end_to_end = request.options.alpha > 0, request.options.end_to_end
    return checked_examples(
        [(make(request.train_dataset), alpha), (make(request.eval_dataset), alpha or end_to_end)],
        request.student,
        teacher,
        request.prepare_student,
        request.prepare_teacher,
    )


def _beside_the_student(
    request: Request, teacher: nn.Module | None, example: Mapping[str, Any] | None, logits: str | None, *, overlap: bool
) -> PreparedTeacher:
    assert teacher is not None, "a teacher beside the student is loaded by this process"
    return TeacherBesideStudent(
        teacher,
        request.student,
        request.objective.teacher_taps,
        probe_inputs(teacher, example, "teacher"),
        example=example,
        rows=_rows(request),
        device=request.args.device,
        sharded=request.args.teacher_placement == "sharded",
        overlap=overlap,
        prepare=request.prepare_teacher,
        autocast=autocast_dtype(request.args),
        without_logits=logits,
    )


def _rows(request: Request) -> int:
    return rows_of_a_batch(request.args, request.train_dataset, request.eval_dataset)


def _dedicated(request: Request, example: Mapping[str, Any] | None, logits: str | None) -> PreparedTeacher:
    args, taps = request.args, request.objective.teacher_taps
    if isinstance(request.teacher, nn.Module) and shares_base(request.student, request.teacher):
        raise PlacementError(
            "A dedicated teacher cannot be the student's own base model. Use teacher_placement=None, or load the "
            "teacher separately."
        )
    world = start_world(
        request.teacher,
        args.teacher_placement,
        require_split_done(args.teacher_placement),
        taps,
        example=example,
        rows=_rows(request),
        autocast=autocast_dtype(args),
        timeouts=(args.teacher_timeout, args.teacher_load_timeout),
        micro_batches=args.teacher_micro_batches,
        wants_head=need_heads(request.objective.alignments),
        without_logits=logits,
    )
    module = request.teacher if isinstance(request.teacher, nn.Module) else None
    return DedicatedTeacher(world, taps, prepare=request.prepare_teacher, device=args.device, module=module)

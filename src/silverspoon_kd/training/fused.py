"""Whether a run's losses on logits are computed without logits, and from which heads."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from silverspoon_kd.alignment import Alignment
from silverspoon_kd.capture.head_form import HeadForm, head_form, head_name
from silverspoon_kd.distributed.plan import Plan
from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.losses.divergences import JensenShannon, KLDivergence, ReverseKL
from silverspoon_kd.objectives import FusedHeads, Objective, OutputObjective, ResponseObjective, conventions_of
from silverspoon_kd.student import StepOptions
from silverspoon_kd.teacher import TeacherFacts
from silverspoon_kd.training.arguments import TrainingArguments
from silverspoon_kd.training.assembly import probe_inputs

FUSED = "without logits, from hidden states and heads"


def alignment_of_logits(objective: Objective, student: nn.Module) -> Alignment | str | None:
    """Return the alignment of both models' logits; why its loss needs them whole; None where nobody learns from logits.

    Args:
        objective: as it was asked for.
        student: the student.
    """
    if isinstance(objective, ResponseObjective):
        return objective.alignments[0]
    head = head_name(student)
    found = [each for each in objective.alignments if head is not None and each.student_module_name == head]
    if not found:
        return None
    alignment = found[0]
    if not isinstance(objective, OutputObjective):
        return f"{objective.kind} learns from what modules take in"
    modules = [each.teacher_module_name for each in objective.alignments]
    if len(found) > 1 or modules.count(alignment.teacher_module_name) > 1:
        return "there are several losses on the output of a head"
    selectors = alignment.student_output_selector, alignment.teacher_output_selector
    if alignment.output_projector is not None or not all(each in (None, 0) for each in selectors):
        return "a projector or a selector changes the logits"
    return alignment


def student_form(
    student: nn.Module,
    objective: Objective,
    options: StepOptions,
    args: TrainingArguments,
    example: Mapping[str, Any] | None,
    *,
    student_mode: str,
    own_base: bool,
) -> HeadForm | str | None:
    """Return the form of the student's head if a loss on logits can do without them on its side, else why it cannot.

    Args:
        student: the student.
        objective: as it was asked for.
        options: of the step.
        args: of the run.
        example: a tiny batch as the student gets it, used where the model's config says too little.
        student_mode: how the student is distributed.
        own_base: the teacher is the student's own base model.

    Returns:
        The form, the reason, or None where nobody learns from logits.

    Raises:
        DataError: there is nothing to try the student with.
    """
    alignment = alignment_of_logits(objective, student)
    if not isinstance(alignment, Alignment):
        return alignment
    if args.fused_losses is False:
        return "fused_losses=False"
    loss: Any = alignment.loss
    if not isinstance(loss, (KLDivergence, ReverseKL, JensenShannon)):
        return f"{loss.name} is not kl_divergence, reverse_kl or jsd"
    with_task = options.alpha > 0
    if with_task and (options.magnitude_aware or options.label_smoothing > 0):
        return "alpha > 0 with magnitude_aware_weighting or label smoothing"
    if own_base and student_mode in ("fsdp", "deepspeed-3"):
        return "the teacher is the student's own base model, whose head is shared out over the ranks"
    shifts = conventions_of(student).shifts_labels if with_task else None
    # ZeRO-3 gathers the weights of each module when it runs, and parts of the head would not.
    adapters = student_mode != "deepspeed-3"
    found = head_form(student, probe_inputs(student, example, "student"), shifts_labels=shifts, adapters=adapters)
    if not isinstance(found, HeadForm):
        return f"student: {found}"
    if with_task and not found.plain_loss:
        return "alpha > 0: the student's own loss is not the cross entropy of its logits"
    if with_task and alignment.student_module_name and (found.scale != 1 or found.soft_cap is not None):
        return "alpha > 0: the aligned head's output is scaled or capped before the student's own loss"
    return found


def settle(
    objective: Objective, student: HeadForm | str | None, facts: TeacherFacts, plan: Plan, args: TrainingArguments
) -> tuple[Objective, Plan]:
    """Return the objective and the plan as they will run.

    Args:
        objective: as it was asked for.
        student: of :func:`student_form`.
        facts: of the teacher.
        plan: of the run.
        args: of the run.

    Raises:
        ConfigurationError: ``fused_losses=True`` cannot be.
    """
    teacher = facts.head_form
    if isinstance(objective, OutputObjective) and isinstance(student, HeadForm) and isinstance(teacher, HeadForm):
        return objective.with_heads(FusedHeads(student, teacher)), replace(plan, logits=FUSED)
    reason = f"teacher: {teacher}" if isinstance(student, HeadForm) else student
    if args.fused_losses:
        raise ConfigurationError(
            f"fused_losses=True cannot be: {reason or 'no loss is on logits'}. Leave fused_losses out to have the "
            "losses computed from what the modules give out."
        )
    return objective, plan if reason is None else replace(plan, logits=f"whole ({reason})")


def bind_teacher_head(objective: Objective, facts: TeacherFacts, device: torch.device) -> None:
    """Give the teacher's head, on the student's device, to an objective that computes its losses from heads."""
    if objective.heads is None:
        return
    assert facts.head is not None, "a head whose form is known is there"
    tensors = (facts.head.weight, facts.head.bias)
    weight, bias = (None if each is None else on_device(each.detach(), device) for each in tensors)
    assert weight is not None
    objective.heads = objective.heads.with_teacher(weight, bias)


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the tensor on the device; the ranks of torchrun are on "cpu:0", to which "cpu" would be copied."""
    return tensor if tensor.device.type == device.type == "cpu" else tensor.to(device)

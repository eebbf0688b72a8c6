"""A teacher is frozen, in evaluation mode, and stays what it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from silverspoon_kd.capture import base_of, is_peft_model
from silverspoon_kd.errors import ConfigurationError, PlacementError, TeacherError
from silverspoon_kd.teacher.loading import describe_model


def check_loaded(teacher: nn.Module) -> None:
    """Refuse a teacher without weights.

    Raises:
        TeacherError: weights are missing (on the meta device without hooks that bring them).
    """
    dispatched = is_self_placed(teacher)
    meta = [name for name, parameter in teacher.named_parameters() if parameter.is_meta]
    if meta and not dispatched:
        raise TeacherError(
            f"The teacher's weights are not loaded: {meta[0]!r} and {len(meta) - 1} more are on the meta device. Load "
            "them (from_pretrained) before passing the model, or pass the model id."
        )


def freeze_teacher(teacher: nn.Module) -> None:
    """Switch to evaluation and switch gradients off, also where someone left them on."""
    teacher.eval()
    for parameter in teacher.parameters():
        parameter.requires_grad = False


def is_self_placed(teacher: nn.Module) -> bool:
    """Tell whether the model manages its own devices or cannot be cast: dispatched, offloaded or quantised."""
    return getattr(teacher, "hf_device_map", None) is not None or bool(getattr(teacher, "is_quantized", False))


def is_quantised(model: nn.Module) -> bool:
    """Tell whether weights are packed, by transformers, by a tensor class of their own or by a module of torch.ao."""
    if getattr(model, "is_quantized", False):
        return True
    packed = (hasattr(type(each), "__tensor_flatten__") or not each.is_floating_point() for each in model.parameters())
    return any(packed) or any(type(each).__module__.startswith("torch.ao.nn.quantized") for each in model.modules())


def check_not_quantised(source: object, where: str) -> None:
    """Refuse, before anything is loaded, to divide packed weights; what a callable will build is not known yet.

    Args:
        source: a module, a model id or folder, or a callable.
        where: the placement as the user wrote it, for the message.

    Raises:
        PlacementError: the weights are quantised.
    """
    if isinstance(source, nn.Module):
        quantised, name = is_quantised(source), type(source).__name__
    elif isinstance(source, str):
        config = describe_model(source, "teacher").config
        quantised, name = getattr(config, "quantization_config", None) is not None, source
    else:
        return
    if quantised:
        raise PlacementError(
            f"{where} divides every weight, but the packed weights of the quantised teacher {name} cannot be divided. "
            "Use a replicated or pipeline ('pp') placement, or load it without quantisation."
        )


def place_replicated(teacher: nn.Module, device: torch.device) -> nn.Module:
    """Move the teacher to ``device`` unless it places itself; its dtype stays as loaded."""
    return teacher if is_self_placed(teacher) else teacher.to(device)


def shares_base(student: nn.Module, teacher: nn.Module) -> bool:
    """Tell whether the teacher is the PEFT student's own base model, to be used with the adapters off."""
    return is_peft_model(student) and not is_peft_model(teacher) and base_of(teacher) is base_of(student)


def check_separate(student: nn.Module, teacher: nn.Module) -> None:
    """Refuse a teacher that is the student, or that shares parameters with it.

    Raises:
        ConfigurationError: a parameter belongs to both.
    """
    if teacher is student:
        raise ConfigurationError(
            "teacher_model and student_model are the same object, so there is nothing to learn and freezing one would "
            "freeze the other. Load the teacher separately, or pass a PEFT student and its base model."
        )
    own = {id(parameter): name for name, parameter in student.named_parameters()}
    shared = next((own[id(p)] for p in teacher.parameters() if id(p) in own), None)
    if shared is not None:
        raise ConfigurationError(
            f"Teacher and student share the parameter {shared!r}, so it would be frozen and trained at once. Give the "
            "student its own copy (copy.deepcopy), or pass a PEFT student and its base model."
        )


@contextmanager
def adapters_off(student: nn.Module) -> Iterator[None]:
    """Run a PEFT student as its own base model: adapters off, evaluation mode, everything as before afterwards."""
    training = [module for module in student.modules() if module.training]
    # PEFT freezes all adapters for this time and afterwards trains the active ones, whatever they were before.
    trainable = [(parameter, parameter.requires_grad) for parameter in student.parameters()]
    student.eval()
    try:
        with student.disable_adapter():  # type: ignore[operator]
            yield
    finally:
        for module in training:
            module.training = True
        for parameter, wanted in trainable:
            parameter.requires_grad_(wanted)

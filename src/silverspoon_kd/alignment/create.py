"""Pairs of modules from patterns."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import nn

from silverspoon_kd.alignment.alignment import Alignment, AlignmentList
from silverspoon_kd.alignment.layer_map import layer_map
from silverspoon_kd.capture import Selector, base_of, named_modules
from silverspoon_kd.errors import AlignmentError, near_names
from silverspoon_kd.losses import Loss
from silverspoon_kd.projectors import ProjectorInit

Modules = str | Sequence[str] | Mapping[str, str]


def create_alignments(
    teacher_model: nn.Module | str,
    student_model: nn.Module | str,
    modules: Modules,
    loss_function: str | Loss | Callable[..., Any] | None = None,
    loss_function_kwargs: Mapping[str, Any] | None = None,
    output_selector_index: Selector = None,
    auto_projector: bool = True,
    projector_init: ProjectorInit = None,
    max_grad_norm: float | None = None,
    *,
    loss_weight: float = 1.0,
    learning_rate: float | None = None,
    weight_decay: float | None = None,
) -> AlignmentList:
    r"""Align modules of two models by name.

    Args:
        teacher_model: the teacher, or a model id or folder (then only its structure is built, without weights).
        student_model: the student, likewise.
        modules: a regex that must match whole module names, the same in both models; a list of them; or a mapping
            ``{teacher regex: student template}`` with back-references, e.g. ``{r"model\.layers\.(\d+)":
            r"model.layers.\1"}``.
        loss_function: a registry name, a loss, or a callable ``(student, teacher) -> scalar``; default "mse".
        loss_function_kwargs: arguments of a named loss.
        output_selector_index: element of a tuple or list output to compare; 0 leaves a bare tensor alone.
        auto_projector: project the student's features where widths differ; False: differing widths are an error.
        projector_init: None, "normal" (std 0.02), "xavier", or a function of the projector.
        max_grad_norm: limit for each alignment's own gradient norm; None: from ``TrainingArguments``.
        loss_weight: factor of each of these terms.
        learning_rate: learning rate of the aligned modules; None: from ``TrainingArguments``.
        weight_decay: weight decay of the aligned modules; None: from ``TrainingArguments``.

    Returns:
        One alignment for each pair, in the teacher's order; lists of several calls can be added.

    Raises:
        AlignmentError: nothing matched, a name has no counterpart, matches are nested, or the numbers of layers differ.
    """
    teacher, student = _structure(teacher_model), _structure(student_model)
    pairs = _pairs(teacher, student, modules)
    _refuse_nested([name for _, name in pairs])
    alignments = [
        Alignment(
            teacher_module_name=teacher_name,
            student_module_name=student_name,
            teacher_output_selector=output_selector_index,
            student_output_selector=output_selector_index,
            auto_projector=auto_projector,
            projector_init=projector_init,
            loss_function=loss_function,
            loss_function_kwargs=loss_function_kwargs,
            loss_weight=loss_weight,
            learning_rate=learning_rate,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
        )
        for teacher_name, student_name in pairs
    ]
    return AlignmentList(alignments, teacher_model, student_model)


def _structure(model: nn.Module | str) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    import torch
    import transformers

    config = transformers.AutoConfig.from_pretrained(model)
    architecture = (config.architectures or [None])[0]
    build = getattr(transformers, architecture or "", None)
    with torch.device("meta"):
        return build(config) if build else transformers.AutoModel.from_config(config)


def _pairs(teacher: nn.Module, student: nn.Module, modules: Modules) -> list[tuple[str, str]]:
    teacher_names = [name for name, _ in named_modules(teacher)]
    student_names = [name for name, _ in named_modules(student)]
    if isinstance(modules, Mapping):
        rules = [(pattern, template) for pattern, template in modules.items()]
    else:
        rules = [(pattern, r"\g<0>") for pattern in ([modules] if isinstance(modules, str) else modules)]
    if not rules:
        raise AlignmentError(
            "modules is empty, so nothing can be aligned. Pass a pattern such as r'model\\.layers\\.\\d+'."
        )
    found: dict[tuple[str, str], None] = {}
    for pattern, template in rules:
        matched = _match(pattern, teacher_names, teacher, "teacher")
        if not isinstance(modules, Mapping):
            _check_same_names(pattern, matched, _match(pattern, student_names, student, "student"), student)
        for name in matched:
            found[(name, _counterpart(pattern, template, name, student_names, student))] = None
    students = [name for _, name in found]
    twice = next((name for name in students if students.count(name) > 1), None)
    if twice is not None:
        raise AlignmentError(f"Two teacher modules map to the student module {twice!r}. Make the patterns one to one.")
    # The order in which the modules stand in the model, so that 10 follows 9 and not 1.
    order = {name: position for position, name in enumerate(teacher_names)}
    return sorted(found, key=lambda pair: order[pair[0]])


def _match(pattern: str, names: Sequence[str], model: nn.Module, which: str) -> list[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise AlignmentError(f"The pattern {pattern!r} is no valid regular expression: {error}.") from error
    matched = [name for name in names if compiled.fullmatch(name)]
    if not matched:
        plain = re.sub(r"\\d\+|\(\\d\+\)", "0", pattern).replace("\\", "")
        near = near_names(plain, names)
        some = ", ".join(repr(name) for name in names[:6])
        raise AlignmentError(
            f"The pattern {pattern!r} matches no module of the {which} {type(base_of(model)).__name__}.{near} "
            f"It must match whole names such as {some}."
        )
    return matched


def _check_same_names(pattern: str, teacher: Sequence[str], student: Sequence[str], student_model: nn.Module) -> None:
    if set(teacher) == set(student):
        return
    if len(teacher) > len(student):
        proposal = layer_map(len(teacher), len(student), "even")
        example = {re.escape(teacher[t]): student[s] for t, s in proposal.items()}
        lines = ", ".join(f"{key!r}: {value!r}" for key, value in example.items())
        raise AlignmentError(
            f"The pattern {pattern!r} matches {len(teacher)} teacher modules and {len(student)} student modules of "
            f"{type(base_of(student_model)).__name__}. Say which teaches which, for example evenly spaced: "
            f"modules={{{lines}}}; silverspoon_kd.alignment.layer_map makes such maps."
        )
    lonely = sorted(set(student) ^ set(teacher))
    raise AlignmentError(
        f"The pattern {pattern!r} matches {len(teacher)} teacher modules and {len(student)} student modules; without "
        f"counterpart: {', '.join(lonely[:6])}. Pass a mapping {{teacher regex: student template}}."
    )


def _counterpart(pattern: str, template: str, name: str, student_names: Sequence[str], student: nn.Module) -> str:
    try:
        wanted = re.fullmatch(pattern, name).expand(template)  # type: ignore[union-attr]
    except (re.error, IndexError) as error:
        raise AlignmentError(f"The template {template!r} does not fit the pattern {pattern!r}: {error}.") from error
    if wanted not in student_names:
        raise AlignmentError(
            f"The teacher module {name!r} maps to {wanted!r}, which {type(base_of(student)).__name__} does not have."
            f"{near_names(wanted, student_names)}"
        )
    return wanted


def _refuse_nested(names: Sequence[str]) -> None:
    for inner in names:
        outer = next((name for name in names if inner.startswith(name + ".")), None)
        if outer is not None:
            raise AlignmentError(
                f"{inner!r} lies inside {outer!r}, so parameters would belong to two alignments. Narrow the pattern."
            )

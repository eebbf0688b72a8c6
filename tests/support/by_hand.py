"""Distillation written out by hand: plain hooks, torch's own losses, plain SGD. No code of the package."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

Inputs = Mapping[str, Tensor]


def first(value: Any) -> Tensor:
    """The tensor, or the first element of a tuple."""
    return value if isinstance(value, Tensor) else value[0]


def cut(value: Any) -> Any:
    """A tensor without its graph; tuples of tensors, such as rotary tables, have none."""
    return value.detach() if isinstance(value, Tensor) else value


def features(
    model: nn.Module, names: Sequence[str], inputs: Inputs, replaced: Mapping[str, Callable[[], Tensor]] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor], Any]:
    """Run ``model`` and return what each named module took in and gave out at its last run, and the model's output.

    Args:
        model: anything.
        names: of its modules.
        inputs: keyword arguments.
        replaced: for module names, what they compute on instead of their first argument; they hand no gradient on.
    """
    taken: dict[str, Tensor] = {}
    given: dict[str, Tensor] = {}
    modules = dict(model.named_modules())

    def before(name: str) -> Callable[..., Any]:
        def hook(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
            taken[name] = args[0]
            if not replaced:
                return None
            return (replaced[name](), *map(cut, args[1:])), {key: cut(value) for key, value in kwargs.items()}

        return hook

    def after(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, output: Any) -> None:
            given[name] = first(output)

        return hook

    with ExitStack() as stack:
        for name in names:
            stack.callback(modules[name].register_forward_pre_hook(before(name), with_kwargs=True).remove)
            stack.callback(modules[name].register_forward_hook(after(name)).remove)
        output = model(**inputs)
    return taken, given, output


def mean_square(student: Tensor, teacher: Tensor, valid: Tensor | None) -> Tensor:
    """torch's mse over the valid positions."""
    if valid is None:
        return functional.mse_loss(student, teacher)
    return functional.mse_loss(student[valid], teacher[valid])


def divergence(student: Tensor, teacher: Tensor) -> Tensor:
    """torch's KL over ``[positions, vocabulary]``, a mean over positions."""
    return functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), log_target=True, reduction="batchmean")


def holistic_loss(
    student: nn.Module,
    teacher: nn.Module,
    names: Sequence[str],
    inputs: Inputs,
    valid: Callable[[str], Tensor | None],
    projectors: Mapping[str, nn.Module],
) -> dict[str, Tensor]:
    """The mse of each module's output, the student's projected to the teacher's width."""
    with torch.no_grad():
        _, targets, _ = features(teacher, names, inputs)
    _, own, _ = features(student, names, inputs)
    return {name: mean_square(projectors[name](own[name]), targets[name], valid(name)) for name in names}


def blockwise_loss(
    student: nn.Module,
    teacher: nn.Module,
    names: Sequence[str],
    inputs: Inputs,
    valid: Callable[[str], Tensor | None],
    projectors: Mapping[str, nn.Module],
    input_projectors: Mapping[str, nn.Module],
) -> dict[str, Tensor]:
    """The same, each student block computing on the teacher's input to its block."""
    with torch.no_grad():
        sources, targets, _ = features(teacher, names, inputs)
    replaced = {name: (lambda name=name: input_projectors[name](sources[name])) for name in names}
    _, own, _ = features(student, names, inputs, replaced)
    return {name: mean_square(projectors[name](own[name]), targets[name], valid(name)) for name in names}


def descend(
    modules: Sequence[nn.Module], compute: Callable[[], Mapping[str, Tensor]], rate: float, steps: int
) -> list[dict[str, float]]:
    """Train all parameters of ``modules`` with plain gradient steps on the sum of the values; return the values."""
    history = []
    parameters = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}.values()
    for _ in range(steps):
        values = compute()
        gradients = torch.autograd.grad(sum(values.values()), list(parameters), allow_unused=True)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                if gradient is not None:
                    parameter -= rate * gradient
        history.append({name: value.item() for name, value in values.items()})
    return history


def identity_or_copy(module: nn.Module | None) -> nn.Module:
    """A copy of a projector that trains on its own, or the identity where there is none."""
    return nn.Identity() if module is None else copy.deepcopy(module)

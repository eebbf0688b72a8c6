"""Which parameters of the student can get a gradient at all."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def reached_parameters(outputs: Iterable[Tensor], parameters: Iterable[Tensor]) -> set[int]:
    """Return the ids of those ``parameters`` that the graph behind ``outputs`` leads to."""
    wanted = {id(parameter) for parameter in parameters}
    found: set[int] = set()
    seen: set[object] = set()
    stack: list = []
    for tensor in outputs:
        # A parameter that is itself an output has no graph.
        if tensor.grad_fn is None and id(tensor) in wanted:
            found.add(id(tensor))
        stack.append(tensor.grad_fn)
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in wanted:
            found.add(id(variable))
        stack.extend(following for following, _ in node.next_functions)
    return found


@contextmanager
def only_trainable(root: nn.Module, names: set[str] | None) -> Iterator[None]:
    """Freeze every parameter of ``root`` that is not in ``names`` while the block runs; None freezes nothing.

    DDP then needs no search for unused parameters, and sharded optimizers hold no dead state.
    """
    frozen = [
        parameter
        for name, parameter in root.named_parameters()
        if names is not None and parameter.requires_grad and name not in names
    ]
    for parameter in frozen:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(True)


@contextmanager
def flags_kept_on_error(*models: nn.Module) -> Iterator[None]:
    """If the block raises, put all flags of the models back and drop the gradients of the step that failed."""
    modes = [(module, module.training) for model in models for module in model.modules()]
    trainable = [(parameter, parameter.requires_grad) for model in models for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, training in modes:
            module.training = training
        for parameter, wanted in trainable:
            parameter.requires_grad_(wanted)
            parameter.grad = None
        raise

"""Which modules of a model are gathered as one when its weights are shared out over processes."""

from collections.abc import Iterable, Sequence

from torch import nn

from silverspoon_kd.capture.names import base_of
from silverspoon_kd.errors import PlacementError, near_names

# Where a model names no blocks: gather at most about this many parameters at a time.
SIZE_THRESHOLD = 100_000_000


def wrap_units(
    model: nn.Module,
    wrap_cls: str | Sequence[str] | None = None,
    size_threshold: int | None = None,
    *,
    wish: str = "wrap_cls",
) -> list[nn.Module]:
    """Return the modules to gather as units, innermost first; one whose weights are used outside it is left out.

    Args:
        model: the whole model.
        wrap_cls: class name or names of the units; None: the model's ``_no_split_modules``, else by size.
        size_threshold: parameters of a unit; given, sizes decide unless ``wrap_cls`` is given.
        wish: how the user calls ``wrap_cls``.

    Raises:
        PlacementError: no module has a class of ``wrap_cls``.
    """
    names = _class_names(model, wrap_cls, wish) if wrap_cls or size_threshold is None else set()
    if names:
        units = [module for module in model.modules() if type(module).__name__ in names and module is not model]
    else:
        units = list(_by_size(model, size_threshold or SIZE_THRESHOLD))
    return [unit for unit in reversed(units) if keeps_to_itself(unit, model)]


def keeps_to_itself(unit: nn.Module, model: nn.Module) -> bool:
    """Tell whether no module outside ``unit`` holds one of its parameters."""
    inside = {id(module) for module in unit.modules()}
    own = {id(parameter) for parameter in unit.parameters()}
    return all(
        id(module) in inside or own.isdisjoint(map(id, module.parameters(recurse=False))) for module in model.modules()
    )


def _class_names(model: nn.Module, wrap_cls: str | Sequence[str] | None, wish: str) -> set[str]:
    present = {type(module).__name__ for module in model.modules()}
    if wrap_cls:
        wanted = {wrap_cls} if isinstance(wrap_cls, str) else set(wrap_cls)
        found = wanted & present
        if not found:
            name = sorted(wanted)[0]
            raise PlacementError(
                f"{wish}={wrap_cls!r}: no module of {type(base_of(model)).__name__} is of this class."
                f"{near_names(name, present)} Its classes are {', '.join(sorted(present))}."
            )
        return found
    declared: Iterable[str] = getattr(base_of(model), "_no_split_modules", None) or ()
    return set(declared) & present


def _by_size(module: nn.Module, threshold: int) -> Iterable[nn.Module]:
    """Yield the largest modules of at most ``threshold`` parameters that have a forward of their own."""
    for child in module.children():
        size = sum(parameter.numel() for parameter in child.parameters())
        has_forward = type(child).forward is not nn.Module.forward
        if size == 0:
            continue
        if size <= threshold and has_forward and 2 * size > threshold:
            yield child
        elif size > threshold:
            yield from _by_size(child, threshold)

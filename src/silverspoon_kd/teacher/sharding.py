"""FSDP2 for a frozen model: every process of a mesh holds a share of each weight and gathers a block when it runs."""

import logging
from collections.abc import Iterable, Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from silverspoon_kd.capture import base_of
from silverspoon_kd.errors import PlacementError, near_names

logger = logging.getLogger(__name__)

# Where a model names no blocks: gather at most about this many parameters at a time.
SIZE_THRESHOLD = 100_000_000


def shard_frozen(
    teacher: nn.Module,
    mesh: DeviceMesh,
    wrap_cls: str | Sequence[str] | None = None,
    size_threshold: int = SIZE_THRESHOLD,
) -> nn.Module:
    """Shard ``teacher`` in place over ``mesh`` and return it.

    Args:
        teacher: frozen, in evaluation mode, on the mesh's device type, with equal weights on all ranks.
        mesh: one-dimensional.
        wrap_cls: module class name or names that are gathered as units; None: the model's ``_no_split_modules``,
            else by size.
        size_threshold: parameters of a unit where sizes decide.

    Raises:
        PlacementError: no module has a class of ``wrap_cls``, or the weights are quantised.
    """
    if getattr(teacher, "is_quantized", False):
        raise PlacementError(
            f"The quantised teacher {type(teacher).__name__} cannot be sharded: its packed weights cannot be split by "
            "rows. Use a replicated or pipeline ('pp') placement, or load it without quantisation."
        )
    for unit in wrap_units(teacher, wrap_cls, size_threshold):
        fully_shard(unit, mesh=mesh)
    # No backward follows for which the weights of the root should stay gathered.
    fully_shard(teacher, mesh=mesh, reshard_after_forward=True)
    return teacher


def free_gathered(teacher: nn.Module) -> None:
    """Free the weights that a forward gathered and, when it was stopped early, did not free itself."""
    for module in teacher.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def wrap_units(
    teacher: nn.Module, wrap_cls: str | Sequence[str] | None, size_threshold: int = SIZE_THRESHOLD
) -> list[nn.Module]:
    """Return the modules to gather as units, innermost first; one whose weights are used outside it is left out.

    Raises:
        PlacementError: no module has a class of ``wrap_cls``.
    """
    names = _class_names(teacher, wrap_cls)
    if names:
        units = [module for module in teacher.modules() if type(module).__name__ in names and module is not teacher]
    else:
        units = list(_by_size(teacher, size_threshold))
    holders: dict[int, set[int]] = {}
    for module in teacher.modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), set()).add(id(module))

    def keeps_to_itself(unit: nn.Module) -> bool:
        inside = {id(module) for module in unit.modules()}
        return all(holders[id(parameter)] <= inside for parameter in unit.parameters())

    return [unit for unit in reversed(units) if keeps_to_itself(unit)]


def _class_names(teacher: nn.Module, wrap_cls: str | Sequence[str] | None) -> set[str]:
    present = {type(module).__name__ for module in teacher.modules()}
    if wrap_cls:
        wanted = {wrap_cls} if isinstance(wrap_cls, str) else set(wrap_cls)
        found = wanted & present
        if not found:
            name = sorted(wanted)[0]
            raise PlacementError(
                f"wrap_cls={wrap_cls!r}: no module of the teacher {type(base_of(teacher)).__name__} is of this class."
                f"{near_names(name, present)} Its classes are {', '.join(sorted(present))}."
            )
        return found
    declared: Iterable[str] = getattr(base_of(teacher), "_no_split_modules", None) or ()
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

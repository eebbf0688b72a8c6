"""FSDP2 for a frozen model: every process of a mesh holds a share of each weight and gathers a block when it runs."""

import logging
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from silverspoon_kd.capture import wrap_units
from silverspoon_kd.teacher.hygiene import check_not_quantised

logger = logging.getLogger(__name__)


def shard_frozen(
    teacher: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    wrap_cls: str | Sequence[str] | None = None,
    size_threshold: int | None = None,
) -> nn.Module:
    """Shard ``teacher`` in place over ``mesh`` and return it; no device ever holds more than a unit of what is not its.

    Args:
        teacher: frozen, in evaluation mode, with equal weights on all ranks.
        mesh: one-dimensional.
        device: of this rank.
        wrap_cls: module class name or names that are gathered as units; None: the model's ``_no_split_modules``,
            else by size.
        size_threshold: parameters of a unit; given, sizes decide.

    Raises:
        PlacementError: no module has a class of ``wrap_cls``, or the weights are quantised.
    """
    check_not_quantised(teacher, "placement 'sharded'")
    for unit in wrap_units(teacher, wrap_cls, size_threshold):
        fully_shard(unit.to(device), mesh=mesh)
    # No backward follows for which the weights of the root should stay gathered.
    fully_shard(teacher.to(device), mesh=mesh, reshard_after_forward=True)
    return teacher


def free_gathered(model: nn.Module) -> None:
    """Free the weights that a forward without a backward gathered and, when it was stopped early, did not free."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()

"""FSDP2 for a frozen model: every process of a mesh holds a share of each weight and gathers a block when it runs."""

import logging
from collections.abc import Sequence

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from silverspoon_kd.capture import wrap_units
from silverspoon_kd.errors import PlacementError

logger = logging.getLogger(__name__)


def shard_frozen(
    teacher: nn.Module,
    mesh: DeviceMesh,
    wrap_cls: str | Sequence[str] | None = None,
    size_threshold: int | None = None,
) -> nn.Module:
    """Shard ``teacher`` in place over ``mesh`` and return it.

    Args:
        teacher: frozen, in evaluation mode, on the mesh's device type, with equal weights on all ranks.
        mesh: one-dimensional.
        wrap_cls: module class name or names that are gathered as units; None: the model's ``_no_split_modules``,
            else by size.
        size_threshold: parameters of a unit; given, sizes decide.

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

"""What the supported versions of transformers do differently; nothing else in the package asks for a version."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def apply_tensor_plan(model: nn.Module, mesh: Any, device: torch.device, leave_out: str | None) -> None:
    """Move a transformers model to a device and split it in place by its own plan of named styles.

    Args:
        model: with equal weights on all ranks.
        mesh: a one-dimensional ``DeviceMesh``.
        device: this rank's of the mesh.
        leave_out: a module that the plan must not touch.
    """
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    base: Any = model
    if not hasattr(base, "_expand_parallel_plan"):
        _apply_by_patterns(base.to(device), mesh, leave_out)
        return
    modules = dict(base.named_modules())
    for name, style in _without(base._expand_parallel_plan(base.tp_plan), leave_out).items():
        # One by one: the device need not have room for the whole model.
        modules[name if name in modules else name.rpartition(".")[0]].to(device)
        apply_tensor_parallelism(base, mesh, {name: style})


def _apply_by_patterns(base: Any, mesh: Any, leave_out: str | None) -> None:
    """As transformers 5.17 does it: from the model's own plan, which has patterns of names, all at once."""
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    whole = base.tp_plan
    base.tp_plan = _without(whole, leave_out)
    try:
        apply_tensor_parallelism(base, mesh)
    finally:
        base.tp_plan = whole


def _without(plan: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    return {key: style for key, style in plan.items() if name is None or not key.startswith(name)}

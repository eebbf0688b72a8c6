"""Gradient clipping per alignment, without waiting for the device."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from silverspoon_kd.errors import ConfigurationError


@torch.no_grad()
def clip_gradients(
    groups: Sequence[dict[str, Any]],
    limits: Mapping[str, float | None],
    *,
    clip_projectors: bool = True,
    over_ranks: Callable[[Tensor], Tensor] | None = None,
    zero_broken: bool = True,
) -> dict[str, Tensor]:
    """Scale each alignment's gradients so that their own 2-norm is at most its limit.

    The factor is ``min(1, limit / (norm + 1e-6))``, as in ``torch.nn.utils.clip_grad_norm_``. Where a norm is NaN or
    infinite, all gradients of that alignment become zero and the other alignments go on; its norm is returned as it is.
    Nothing here waits for the device.

    Args:
        groups: Parameter groups that carry ``"alignment"`` and ``"projector"``; gradients may be sharded (DTensor),
            on several devices and of several dtypes.
        limits: Alignment name -> limit. None, 0 or a missing name: the norm is measured, nothing is clipped.
        clip_projectors: False leaves the gradients of projectors out of the norm and out of the scaling. A projector
            gradient that is not finite still makes its alignment's norm NaN and its gradients zero.
        over_ranks: Given where every rank has only a part of each gradient, as plain tensors: adds a tensor of squares
            up over the ranks. It is called once. The groups are the same on all ranks.
        zero_broken: False leaves gradients that are not finite to somebody who looks for them.

    Returns:
        Alignment name -> norm before clipping, and ``""`` -> norm over all alignments; 0-dim tensors, not sharded.

    Raises:
        ConfigurationError: A limit is negative.
    """
    names = dict.fromkeys(group["alignment"] for group in groups)
    chosen: list[tuple[list[Tensor], list[Tensor]]] = []
    parts: list[Tensor] = []
    for name in names:
        own = [group for group in groups if group["alignment"] == name]
        counted = _gradients(group for group in own if clip_projectors or not group["projector"])
        excluded = _gradients(group for group in own if group["projector"] and not clip_projectors)
        chosen.append((counted, excluded))
        parts += [_norm(counted, own), _norm(excluded, own)]
    if over_ranks is not None and parts:
        squares = torch.stack([part.to(parts[0].device) for part in parts]).square()
        parts = list(over_ranks(squares).sqrt())
    norms: dict[str, Tensor] = {}
    for index, (name, (counted, excluded)) in enumerate(zip(names, chosen, strict=True)):
        limit = limits.get(name) or 0.0
        if limit < 0:
            raise ConfigurationError(f"alignment {name!r}: max_grad_norm={limit} is negative. Use 0 to switch it off.")
        # 0 * inf and 0 * NaN are NaN: an excluded gradient changes the norm only where it is not finite.
        norms[name] = norm = parts[2 * index] + 0.0 * parts[2 * index + 1]
        if limit:
            _scale(counted, torch.clamp(limit / (norm + 1e-6), max=1.0))
        if zero_broken:
            _zero_unless(torch.isfinite(norm), counted + excluded)
    if norms:
        first = next(iter(norms.values()))
        norms[""] = torch.linalg.vector_norm(torch.stack([norm.to(first.device) for norm in norms.values()]))
    return norms


def _gradients(groups: Iterable[dict[str, Any]]) -> list[Tensor]:
    return [p.grad for group in groups for p in group["params"] if p.grad is not None]


def _mesh(tensor: Tensor) -> Any:
    return getattr(tensor, "device_mesh", None)  # only a DTensor has one


def _local(tensor: Any) -> Tensor:
    # Scaling is elementwise, so it acts on this rank's shard, which shares memory with the DTensor.
    return tensor if _mesh(tensor) is None else tensor.to_local()


def _norm(gradients: list[Tensor], groups: Sequence[dict[str, Any]]) -> Tensor:
    if not gradients:
        return torch.zeros((), device=_local(groups[0]["params"][0]).device)
    buckets: dict[tuple[Any, torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        buckets[_mesh(gradient), gradient.device, gradient.dtype].append(gradient)
    device = gradients[0].device
    parts = []
    for (mesh, _, dtype), bucket in buckets.items():
        # A norm in half precision overflows at 65504 and has three digits.
        accumulate = torch.promote_types(dtype, torch.float32)
        part = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(bucket, 2.0, accumulate)))
        parts.append((part if mesh is None else part.full_tensor()).to(device))
    return torch.linalg.vector_norm(torch.stack(parts))


def _scale(gradients: list[Tensor], factor: Tensor) -> None:
    buckets: dict[tuple[torch.device, torch.dtype], list[Tensor]] = defaultdict(list)
    for gradient in map(_local, gradients):
        buckets[gradient.device, gradient.dtype].append(gradient)
    for (device, _), bucket in buckets.items():
        torch._foreach_mul_(bucket, factor.to(device))


def _zero_unless(finite: Tensor, gradients: list[Tensor]) -> None:
    # Multiplying by 0 would keep NaN; the mask is a tensor, so the host never learns whether it was set.
    broken: dict[torch.device, Tensor] = {}
    for gradient in map(_local, gradients):
        if gradient.device not in broken:
            broken[gradient.device] = ~finite.to(gradient.device)
        # On the CPU there is nothing to wait for, and a pass over all gradients to save.
        if gradient.device.type != "cpu" or broken[gradient.device]:
            gradient.masked_fill_(broken[gradient.device], 0.0)

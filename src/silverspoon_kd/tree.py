"""Nested batches and outputs: tensors are changed wherever they are, everything else is passed through unchanged."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def map_tensors(fn: Callable[[Tensor], Any], tree: Any) -> Any:
    """Return ``tree`` with ``fn`` applied to each tensor; container types (also model outputs) are kept."""
    if isinstance(tree, Tensor):
        return fn(tree)
    if isinstance(tree, Mapping):
        changed = {key: map_tensors(fn, value) for key, value in tree.items()}
        kind: Any = type(tree)
        # Model outputs are mappings and data classes at once: their fields are keyword arguments.
        return kind(**changed) if dataclasses.is_dataclass(tree) else kind(changed)
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(fn, value) for value in tree))
    if isinstance(tree, (list, tuple)):
        return type(tree)(map_tensors(fn, value) for value in tree)
    return tree


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Yield every tensor in ``tree``, depth first."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)


def to_device(tree: Any, device: torch.device) -> Any:
    """Return ``tree`` with each tensor on ``device``."""
    return map_tensors(lambda tensor: tensor.to(device), tree)


def shapes(tree: Mapping[str, Any]) -> str:
    """Return ``name [2, 8], other [2]`` for the tensors of a batch, for messages."""
    return ", ".join(f"{name} {list(value.shape)}" for name, value in tree.items() if isinstance(value, Tensor))

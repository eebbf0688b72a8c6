"""Dividing a batch by rows, so that what is computed of its parts can be joined again.

A batch is divided only where it is clear which of its tensors have a row for each example: where a length that is the
number of rows could just as well be something else, one forward of the whole batch is slower and right.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from silverspoon_kd.tree import map_tensors, tensors_in


def num_parts(inputs: Mapping[str, Any], main_input: str | None, wanted: int) -> int:
    """Return into how many parts of at least one row a batch is divided.

    Args:
        inputs: keyword arguments of the teacher's forward.
        main_input: the one that tells the number of rows; None or absent: every tensor must have it.
        wanted: the largest number of parts.
    """
    first = _first(inputs, main_input)
    if wanted < 2 or first is None or not _is_clear(inputs, first, first is inputs.get(main_input or "")):
        return 1
    return max(1, min(wanted, len(first)))


def part_of(inputs: Mapping[str, Any], main_input: str | None, number: int, parts: int) -> dict[str, Any]:
    """Return part ``number`` of the ``parts`` that :func:`num_parts` allowed; what has no rows is in all of them."""
    first = _first(inputs, main_input)
    if parts == 1 or first is None:
        return dict(inputs)
    rows = len(first)
    start, end = rows * number // parts, rows * (number + 1) // parts
    return _map_rows(inputs, rows, lambda tensor: tensor[start:end])


def doubled(inputs: Mapping[str, Any], main_input: str | None) -> dict[str, Any] | None:
    """Return the batch with every row twice, None where it is not clear what a row is."""
    first = _first(inputs, main_input)
    if first is None or not _is_clear(inputs, first, first is inputs.get(main_input or "")):
        return None
    return _map_rows(inputs, len(first), lambda tensor: torch.cat([tensor, tensor]))


def _first(inputs: Mapping[str, Any], main_input: str | None) -> Tensor | None:
    main = inputs.get(main_input or "")
    if isinstance(main, Tensor) and main.dim():
        return main
    return next((tensor for tensor in tensors_in(inputs) if tensor.dim()), None)


def _map_rows(inputs: Mapping[str, Any], rows: int, change: Any) -> dict[str, Any]:
    return map_tensors(lambda tensor: change(tensor) if tensor.dim() and len(tensor) == rows else tensor, dict(inputs))


def _is_clear(tree: Any, first: Tensor, known: bool) -> bool:
    """Tell whether each tensor has a row for each of ``first``, or none; ``known``: these are the rows for certain."""
    rows = len(first)
    if isinstance(tree, Tensor):
        if tree is first or tree.dim() == 0:
            return True
        if len(tree) == rows:
            # [3, batch, length] for a batch of three, or [length] for a batch of as many rows.
            return rows not in (tree.shape[1:] or first.shape[1:])
        return rows not in tree.shape and (known or len(tree) == 1)
    if isinstance(tree, Mapping):
        return all(_is_clear(value, first, known) for value in tree.values())
    if isinstance(tree, (list, tuple)):
        return len(tree) != rows and all(_is_clear(value, first, known) for value in tree)
    return True

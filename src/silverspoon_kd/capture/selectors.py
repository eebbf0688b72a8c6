"""Which part of a module's output an alignment compares."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from silverspoon_kd.errors import AlignmentError

Selector = int | str | Callable[[Any], Tensor] | None
"""An index into a tuple or list, a key of a mapping, a function of the whole output, or None for a bare tensor."""


def select(value: Any, selector: Selector, where: str) -> Tensor:
    """Return the tensor that ``selector`` picks from a module's output.

    Index 0 leaves a bare tensor alone: decoder layers return a tensor in some versions and a tuple in others.

    Raises:
        AlignmentError: the selector does not fit what the module returned.
    """
    picked = selector(value) if callable(selector) else _pick(value, selector, where)
    if not isinstance(picked, Tensor):
        raise AlignmentError(
            f"The selector {selector!r} of {where} picked a {type(picked).__name__}, but a loss compares tensors. "
            "Choose another index or key, or pass a function of the output."
        )
    return picked


def select_logits(output: Any) -> Tensor:
    """Return the logits of a model's output: the field ``logits``, a tuple's first tensor, or the tensor itself."""
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        if isinstance(output.get("logits"), Tensor):
            return output["logits"]
        tensors = {key: item for key, item in output.items() if isinstance(item, Tensor) and key != "loss"}
        if len(tensors) == 1:
            return next(iter(tensors.values()))
        raise AlignmentError(
            f"The model returned {sorted(output)} and no 'logits'. Return the logits under that name, or align "
            "modules by name with a selector."
        )
    if isinstance(output, (tuple, list)):
        # A model that was given labels returns the scalar loss first.
        for item in output:
            if isinstance(item, Tensor) and item.dim() > 0:
                return item
    raise AlignmentError(f"The model returned a {type(output).__name__}, in which there are no logits.")


def _pick(value: Any, selector: int | str | None, where: str) -> Any:
    if isinstance(value, Tensor):
        if selector in (None, 0):
            return value
        raise AlignmentError(
            f"The selector {selector!r} of {where} needs a tuple or mapping, but the module returns a bare tensor of "
            f"shape {list(value.shape)}. Leave the selector out."
        )
    if isinstance(value, Mapping) and isinstance(selector, str):
        if selector not in value:
            raise AlignmentError(f"The selector {selector!r} of {where} is not a key of its output {sorted(value)}.")
        return value[selector]
    items = list(value.values()) if isinstance(value, Mapping) else value
    if isinstance(items, (tuple, list)) and isinstance(selector, int):
        if not -len(items) <= selector < len(items):
            raise AlignmentError(
                f"The selector {selector} of {where} is out of range: its output has {len(items)} elements."
            )
        return items[selector]
    kind = f"a {type(value).__name__}" + (f" of {len(items)} elements" if isinstance(items, (tuple, list)) else "")
    raise AlignmentError(
        f"The output of {where} is {kind}, but its selector is {selector!r}. Pass output_selector_index=0 (or the "
        "index, key or function that picks the hidden states)."
    )

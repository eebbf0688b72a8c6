"""The teacher's output head, for losses that turn hidden states into logits themselves."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from silverspoon_kd.capture import embeddings_of


@dataclass(frozen=True)
class Head:
    """What makes logits of the hidden states that the head module takes in; a final norm comes before it.

    Attributes:
        weight: ``[vocabulary, hidden]``.
        bias: ``[vocabulary]``; None: there is none.
    """

    weight: Tensor
    bias: Tensor | None


def head_module(model: nn.Module) -> nn.Module | None:
    """Return the model's output embeddings if they are a matrix of numbers, else None."""
    found = embeddings_of(model, "output")
    weight = getattr(found, "weight", None)
    usable = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point() and not weight.is_meta
    return found if usable else None


def head_of(model: nn.Module) -> Head | None:
    """Return the model's head, which stays the model's own: the tensors move with it."""
    module: Any = head_module(model)
    return None if module is None else Head(module.weight, getattr(module, "bias", None))

"""A new student of the same architecture with another size."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from silverspoon_kd.errors import ConfigurationError
from silverspoon_kd.model_tools.configs import (
    build_like,
    changed_config,
    check_folder,
    check_transformers_model,
    copy_into,
    freeze_named,
    layer_stacks,
    own_field,
    save_model,
)

logger = logging.getLogger(__name__)

_CHOICES = ("even", "first", "last")


def reconfig_model(
    model: nn.Module,
    name_or_path: str | Path,
    diff: Mapping[str, Any] | None = None,
    copy_matching_weights: bool = False,
    freeze_copied_weights: bool = False,
    *,
    layers: Sequence[int] | str | None = None,
) -> PreTrainedModel:
    """Build a model of the same architecture with some config fields changed, save it and return it.

    Fields that are not in ``diff`` keep their value, also those that were once derived: halve ``num_attention_heads``
    and ``head_dim`` stays.

    Args:
        model: A transformers model; it is not changed.
        name_or_path: Folder to save to, readable by ``from_pretrained``.
        diff: Config field -> new value, such as ``{"num_hidden_layers": 10}``. None: an equal config.
        copy_matching_weights: Copy every tensor whose name and shape are the same in both models; all others are
            freshly initialised.
        freeze_copied_weights: Freeze what was copied.
        layers: Which layers of ``model`` become layers 0..n-1 of the new one, also in per-layer lists of the config:
            indices, or a choice of :func:`kept_layers`. None: the first.

    Raises:
        ConfigurationError: An unknown field, values that do not fit together, layers that do not exist.
    """
    source = check_transformers_model(model, "reconfig_model")
    folder = check_folder(name_or_path)
    if freeze_copied_weights and not copy_matching_weights:
        raise ConfigurationError(
            "freeze_copied_weights=True was asked, but copy_matching_weights=False copies nothing. Set both."
        )
    chosen = _source_layers(source, diff or {}, layers)
    built = build_like(source, changed_config(source, diff or {}, chosen))
    if copy_matching_weights:
        copied = _copy(source, built, chosen)
        logger.info("Copied %d of %d tensors.", len(copied), len(built.state_dict()))
        if freeze_copied_weights:
            freeze_named(built, copied)
    save_model(built, folder)
    return built


def kept_layers(depth: int, wanted: int, choose: str) -> list[int]:
    """Return which layers of a model a shallower one keeps.

    Args:
        depth: Number of layers of the model.
        wanted: Number of layers to keep.
        choose: "even" (evenly spaced from the first to the last; of a single one, the first), "first" or "last".

    Raises:
        ConfigurationError: The choice is unknown, or there are not so many layers.
    """
    if choose not in _CHOICES:
        raise ConfigurationError(f"layers={choose!r} is unknown. Use {', '.join(map(repr, _CHOICES))} or indices.")
    if not 0 < wanted <= depth:
        raise ConfigurationError(
            f"layers={choose!r} cannot choose {wanted} of {depth} layers. Give one index for each new layer."
        )
    if choose == "even":
        # Without the first layer the others never see what they are used to, without the last one the head does not.
        steps = max(wanted - 1, 1)
        return [(2 * number * (depth - 1) + steps) // (2 * steps) for number in range(wanted)]
    return list(range(wanted)) if choose == "first" else list(range(depth - wanted, depth))


def _source_layers(
    model: PreTrainedModel, diff: Mapping[str, Any], layers: Sequence[int] | str | None
) -> list[int] | None:
    """The layer of ``model`` behind each new layer; None where the depth is not a number or does not change."""
    field = own_field(model.config, "num_hidden_layers")
    depth = model.config.to_dict().get(field)
    wanted = {own_field(model.config, key): value for key, value in diff.items()}.get(field, depth)
    if not isinstance(depth, int) or not isinstance(wanted, int):
        if layers is not None:
            raise ConfigurationError(
                f"layers={layers!r} was asked, but {type(model.config).__name__} has no number of layers. Leave it out."
            )
        return None
    if layers is None:
        return None if wanted >= depth else list(range(wanted))
    if isinstance(layers, str):
        return kept_layers(depth, wanted, layers)
    chosen = list(layers)
    if len(chosen) != wanted or any(not isinstance(i, int) or not 0 <= i < depth for i in chosen):
        raise ConfigurationError(
            f"layers={chosen} was asked, but the new model has {wanted} layers and the old one has layers 0 to "
            f"{depth - 1}. Give one index for each new layer."
        )
    return chosen


def _copy(source: PreTrainedModel, target: PreTrainedModel, chosen: Sequence[int] | None) -> set[str]:
    """Copy what fits; return the names of the copied tensors in ``target``."""
    stacks = [] if chosen is None else layer_stacks(source, source.config.num_hidden_layers)
    available = source.state_dict()
    copied = set()
    for name, tensor in target.state_dict().items():
        other = available.get(_source_name(name, stacks, chosen or ()))
        if other is not None and other.shape == tensor.shape:
            copy_into(tensor, other)
            copied.add(name)
    return copied


def _source_name(name: str, stacks: Sequence[str], chosen: Sequence[int]) -> str:
    for stack in stacks:
        if name.startswith(f"{stack}."):
            index, _, rest = name[len(stack) + 1 :].partition(".")
            return f"{stack}.{chosen[int(index)]}.{rest}"
    return name

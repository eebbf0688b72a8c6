"""What can be pruned: sizes and heads, checked before anything is cut."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from silverspoon_kd.errors import ConfigurationError, near_names
from silverspoon_kd.model_tools.configs import changed_config, output_width, own_field

ModuleKey = str | nn.Module

# Attention whose heads are removed whole, and attention whose heads may become narrower.
WHOLE_HEADS = ("q_proj", "k_proj", "v_proj", "o_proj")
_NARROW_HEADS = frozenset({"query", "key", "value", "q_lin", "k_lin", "v_lin"})


def layer_widths(model: nn.Module) -> dict[str, int]:
    """Return layer name -> number of output channels."""
    return {name: width for name, module in model.named_modules() if (width := output_width(module)) is not None}


def head_layers(model: PreTrainedModel) -> dict[ModuleKey, int]:
    """Return the names of query, key and value layers whose heads may become narrower -> number of heads."""
    heads = getattr(model.config, "num_attention_heads", None)
    if not isinstance(heads, int):
        return {}
    return {name: heads for name, _ in model.named_modules() if name.rpartition(".")[2] in _NARROW_HEADS}


def named_widths(model: nn.Module, diff: Mapping[str, Any], round_to: int | None) -> dict[str, int]:
    """Return ``diff`` of a module without a config, checked and rounded up.

    Raises:
        ConfigurationError: A layer is unknown or a number is no smaller width.
    """
    current = layer_widths(model)
    widths = {}
    for name, width in diff.items():
        if name not in current:
            raise ConfigurationError(
                f"diff names the module {name!r}, but {type(model).__name__} has no linear or convolution layer of "
                f"this name.{near_names(name, current)} Layers: {', '.join(current)}."
            )
        if isinstance(width, bool) or not isinstance(width, int) or not 0 < width <= current[name]:
            raise ConfigurationError(
                f"diff asks for {width!r} output channels of {name!r}, which has {current[name]}. Pass a number from 1 "
                f"to {current[name]}."
            )
        widths[name] = min(current[name], -(-width // round_to) * round_to) if round_to else width
    return widths


def check_depth(model: PreTrainedModel, diff: Mapping[str, Any]) -> None:
    """Refuse another number of layers.

    Raises:
        ConfigurationError: ``diff`` changes it.
    """
    depth = own_field(model.config, "num_hidden_layers")
    changes = {own_field(model.config, field): value for field, value in diff.items()}
    if depth in changes and changes[depth] != getattr(model.config, depth):
        raise ConfigurationError(
            f"diff asks for {depth}={changes[depth]}, but pruning removes channels, not layers. Use reconfig_model "
            "with layers=... for that, before or after."
        )


def check_multiples(model: PreTrainedModel, blueprint: PreTrainedModel, round_to: int | None) -> None:
    """Refuse new widths that are no multiple of ``round_to``.

    Raises:
        ConfigurationError: There is one.
    """
    before = layer_widths(model)
    for name, width in layer_widths(blueprint).items():
        if round_to and width != before.get(name) and width % round_to:
            raise ConfigurationError(
                f"diff makes {name!r} {width} channels wide, which is no multiple of round_to={round_to}. The next "
                f"multiple is {-(-width // round_to) * round_to}."
            )


def check_field(model: PreTrainedModel, diff: Mapping[str, Any], field: str) -> None:
    """Refuse a field that removes nothing: weights would be kept whole and used in another way.

    Raises:
        ConfigurationError: ``diff[field]`` changes no shape and no size of a head.
    """
    others = {key: value for key, value in diff.items() if key != field}
    try:
        sizes = [_sizes(model, part) for part in (diff, others)]
    except (ConfigurationError, ValueError, RuntimeError):
        return  # the other fields need this one
    if sizes[0] == sizes[1]:
        raise ConfigurationError(
            f"diff changes {field!r} to {diff[field]!r}, but that removes no channel of {type(model).__name__}; its "
            "weights would only be read in another way. Leave it out, or use reconfig_model."
        )


def check_heads(model: PreTrainedModel, blueprint: PreTrainedModel, grouped: set[str]) -> None:
    """Refuse to cut attention where it is not known which channels form a head.

    Args:
        model: As it is.
        blueprint: With the wanted sizes.
        grouped: Names of layers that are cut evenly inside each head.

    Raises:
        ConfigurationError: Heads would be mixed up.
    """
    for name, module in model.named_modules():
        before, after = _head_size(module), _head_size(blueprint.get_submodule(name))
        narrow = [f"{name}.{child}" in grouped for child, _ in module.named_children()]
        if before != after and not any(narrow):
            raise ConfigurationError(
                f"diff would make the heads of {name!r} {after} channels wide instead of {before}, but heads are only "
                "removed whole. Change the number of heads in the same diff so that the size of a head stays."
            )
        if any(narrow) and _num_heads(model) != _num_heads(blueprint):
            raise ConfigurationError(
                f"diff changes the number of heads of {name!r} from {_num_heads(model)} to {_num_heads(blueprint)}, "
                "but its heads can only become narrower. Leave the number of heads alone."
            )
    known = {name for name in layer_widths(model) if name in grouped or name.rpartition(".")[2] in WHOLE_HEADS}
    _check_inside_attention(model, blueprint, known)


def _check_inside_attention(model: PreTrainedModel, blueprint: PreTrainedModel, known: set[str]) -> None:
    hidden = [getattr(m.config, "hidden_size", None) for m in (model, blueprint)]
    after = layer_widths(blueprint)
    for name, width in layer_widths(model).items():
        inside = any("attn" in part or "attention" in part for part in name.lower().split("."))
        change = [width, after.get(name, width)]
        if inside and width != change[1] and change != hidden and name not in known:
            raise ConfigurationError(
                f"{name!r} of {type(model).__name__} would shrink from {width} to {change[1]} channels, but how they "
                "are divided into heads is not known here. Pass num_heads={name: number of heads} if each head may "
                "lose the same channels, or leave the hidden size and the heads alone."
            )


def _sizes(model: PreTrainedModel, diff: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    with torch.device("meta"):
        built = type(model)(changed_config(model, diff))
    shapes = {name: tensor.shape for name, tensor in built.state_dict().items()}
    return shapes, {name: _head_size(module) for name, module in built.named_modules()}


def _head_size(module: nn.Module) -> int | None:
    # Foreign attention modules keep the size of a head under one of these names.
    sizes = [getattr(module, name, None) for name in ("head_dim", "attention_head_size")]
    return next((size for size in sizes if isinstance(size, int)), None)


def _num_heads(model: PreTrainedModel) -> int | None:
    return getattr(model.config, "num_attention_heads", None)

"""Models of the same architecture with other fields in their config."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from silverspoon_kd.errors import ConfigurationError, near_names

logger = logging.getLogger(__name__)


def check_transformers_model(model: nn.Module, function: str) -> PreTrainedModel:
    """Return ``model`` as a transformers model.

    Raises:
        ConfigurationError: It is another kind of module, so it has no config to build from.
    """
    if isinstance(model, PreTrainedModel):
        return model
    raise ConfigurationError(
        f"{function} builds a model from model.config, but {type(model).__name__} is no transformers model. "
        "Build the smaller module yourself."
    )


def check_folder(name_or_path: str | Path) -> Path:
    """Return the folder to save to.

    Raises:
        ConfigurationError: A file has this name.
    """
    folder = Path(name_or_path)
    if folder.is_file():
        raise ConfigurationError(
            f"name_or_path={str(folder)!r} must be a folder, but it is a file. Choose another name."
        )
    return folder


def own_field(config: PreTrainedConfig, field: str) -> str:
    """Return the config's own name of a standard field: GPT-2 calls ``num_hidden_layers`` ``n_layer``."""
    return config.attribute_map.get(field, field)


def changed_config(
    model: PreTrainedModel, diff: Mapping[str, Any], source_layers: Sequence[int] | None = None
) -> PreTrainedConfig:
    """Copy the config of ``model`` with some fields replaced; all other fields keep their value.

    Args:
        model: Stays as it is.
        diff: Field -> new value, under the config's own names or the standard ones of transformers.
        source_layers: Which layers of ``model`` the new ones stand for; lists with one entry per layer
            (``layer_types``) are picked accordingly. None leaves such lists alone.

    Raises:
        ConfigurationError: A field is unknown, or the values do not fit together.
    """
    config = model.config
    values = config.to_dict()
    known = sorted({*values, *config.attribute_map, "num_labels"})
    for field in diff:
        if field not in known:
            raise ConfigurationError(
                f"diff names the field {field!r}, which {type(config).__name__} does not have."
                f"{near_names(field, known)} Fields: {', '.join(known)}."
            )
    changes = {own_field(config, field): value for field, value in diff.items()}
    if "num_labels" in changes:
        values = {key: value for key, value in values.items() if key not in ("id2label", "label2id")}
    if source_layers is not None:
        depth = config.num_hidden_layers
        changes = {
            **{
                key: [value[i] for i in source_layers] for key, value in values.items() if _per_layer(key, value, depth)
            },
            **changes,
        }
    try:
        # The constructor validates what belongs together; setting attributes would not.
        return type(config).from_dict({**values, **changes}, attn_implementation=config._attn_implementation)
    except Exception as error:
        raise ConfigurationError(
            f"{type(config).__name__} refuses the changed fields {dict(diff)}: {error} Change the fields that belong "
            "together in one diff."
        ) from error


def build_like(model: PreTrainedModel, config: PreTrainedConfig) -> PreTrainedModel:
    """Build a model of the class of ``model`` from ``config``, with its dtype, device, mode and generation settings.

    Raises:
        ConfigurationError: The class cannot be built from these values.
    """
    try:
        built = type(model)(config)
    except Exception as error:
        raise ConfigurationError(
            f"{type(model).__name__} cannot be built from the changed config: {error} Change the fields that belong "
            "together in one diff."
        ) from error
    built = built.to(device=model.device, dtype=model.dtype).train(model.training)
    generation = getattr(model, "generation_config", None)  # only models that generate have one
    if generation is not None:
        built.generation_config = type(generation).from_dict(generation.to_dict())
    return built


def save_model(model: PreTrainedModel, folder: Path) -> None:
    """Save ``model`` so that ``from_pretrained(folder)`` loads it."""
    model.save_pretrained(folder)
    model.name_or_path = str(folder)
    logger.info("Saved %s with %d parameters to %s.", type(model).__name__, model.num_parameters(), folder)


def output_width(module: nn.Module) -> int | None:
    """Return the number of output channels of a linear or convolution layer, None for any other module."""
    if isinstance(module, nn.Linear):
        return module.out_features
    if isinstance(module, nn.modules.conv._ConvNd):
        return module.out_channels
    if type(module).__name__ == "Conv1D":  # the linear layer of GPT-2, [in, out]
        return int(module.nf)  # type: ignore[arg-type]
    return None


def layer_stacks(model: nn.Module, depth: int) -> list[str]:
    """Return the names of the module lists that hold one module per layer."""
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == depth
    ]


def freeze_named(model: nn.Module, names: set[str]) -> None:
    """Freeze the parameters of these names; a tied parameter has several names."""
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in names:
            parameter.requires_grad_(False)


def _per_layer(key: str, value: Any, depth: int) -> bool:
    # Lists of token ids and of architectures have no layers, whatever their length.
    other = key.endswith(("_token_id", "_token_ids")) or key == "architectures"
    return isinstance(value, list | tuple) and len(value) == depth and not other


def copy_into(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy values in place, across dtypes and devices."""
    with torch.no_grad():
        target.copy_(source)

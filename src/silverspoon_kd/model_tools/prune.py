"""A narrower student: the most important channels and heads of a model."""

import copy
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from silverspoon_kd.errors import ConfigurationError, MissingDependencyError, near_names
from silverspoon_kd.model_tools.configs import build_like, changed_config, check_folder, freeze_named, save_model
from silverspoon_kd.model_tools.prune_checks import (
    ModuleKey,
    check_depth,
    check_field,
    check_heads,
    check_multiples,
    head_layers,
    layer_widths,
    named_widths,
)
from silverspoon_kd.tree import tensors_in

logger = logging.getLogger(__name__)


def prune_model(
    model: nn.Module,
    name_or_path: str | Path,
    diff: Mapping[str, Any] | None = None,
    example_inputs: Any = None,
    output_transform: Callable[[Any], Any] | None = None,
    ignored_layers: Sequence[ModuleKey] | None = None,
    num_heads: Mapping[ModuleKey, int] | None = None,
    out_channel_groups: Mapping[ModuleKey, int] | None = None,
    forward_fn: Callable[[nn.Module, Any], Any] | None = None,
    round_to: int | None = None,
    freeze_copied_weights: bool = False,
) -> nn.Module:
    """Remove the channels and heads of smallest weight from a copy of ``model``, save the copy and return it.

    Channels that belong together are found by torch-pruning (DepGraph, Fang et al. 2023, arXiv:2301.12900) and ranked
    by the 2-norm of all their weights. Attention with ``q_proj``, ``k_proj``, ``v_proj`` and ``o_proj`` loses whole
    heads: first key-value heads, then query heads within those that stay.

    Args:
        model: A transformers model or any module; it is not changed.
        name_or_path: Folder to save to: for ``from_pretrained``, or a state dict in ``model.safetensors``.
        diff: Config field -> smaller value, such as ``{"intermediate_size": 1024}``. For a module without a config,
            layer name -> number of output channels that stay.
        example_inputs: A tensor, a tuple or a dict of keyword arguments. None: made up from ``main_input_name``.
        output_transform: Picks tensors from the output. None: every tensor that has a gradient.
        ignored_layers: Modules, or their names, whose outputs keep all channels.
        num_heads: Module or name -> heads; channels are removed evenly inside every head, the number of heads stays.
        out_channel_groups: Module or name -> groups of output channels; each group loses the same channels.
        forward_fn: ``forward_fn(model, example_inputs)``, in place of calling the model.
        round_to: Channel numbers are multiples of this; those of ``diff`` are rounded up (a config is checked).
        freeze_copied_weights: Freeze the tensors that no pruning touched.

    Raises:
        ConfigurationError: A name or number is wrong, or the model cannot be pruned this way.
        MissingDependencyError: torch-pruning is not installed.
    """
    folder = check_folder(name_or_path)
    diff = _wanted(diff)
    groups = {**(num_heads or {}), **(out_channel_groups or {})}
    blueprint = None
    if isinstance(model, PreTrainedModel):
        groups = {**head_layers(model), **groups}
        blueprint = _blueprint(model, diff, {_name(model, key) for key in groups}, round_to)
    widths = named_widths(model, diff, round_to) if blueprint is None else layer_widths(blueprint)
    pruned = copy.deepcopy(model).requires_grad_(True)
    _cut(
        pruned,
        widths,
        example_inputs=_example_inputs(model) if example_inputs is None else example_inputs,
        output_transform=output_transform or _with_gradient,
        ignored=[_name(model, key) for key in ignored_layers or ()],
        groups={_name(model, key): number for key, number in groups.items()},
        forward_fn=forward_fn,
        whole_heads=blueprint is not None,
    )
    result = pruned if blueprint is None else _transplant(pruned, blueprint, diff)
    _restore_flags(result, model, freeze_copied_weights)
    _save(result, folder)
    return result


def _wanted(diff: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if importlib.util.find_spec("torch_pruning") is None:
        raise MissingDependencyError(
            "prune_model needs torch-pruning, which is not installed. Run: pip install 'silverspoon-kd[prune]'."
        )
    if not diff:
        raise ConfigurationError(
            "prune_model was called without diff, so there is nothing to remove. Pass the smaller sizes, such as "
            "diff={'intermediate_size': 1024}."
        )
    return diff


def _cut(model: nn.Module, widths: Mapping[str, int], **options: Any) -> None:
    from silverspoon_kd.model_tools.channels import cut_channels  # needs torch-pruning

    mode = model.training
    with torch.enable_grad():
        cut_channels(model, widths, **options)
    model.train(mode)


def _blueprint(
    model: PreTrainedModel, diff: Mapping[str, Any], grouped: set[str], round_to: int | None
) -> PreTrainedModel:
    """A model with the wanted sizes and random weights."""
    check_depth(model, diff)
    config = changed_config(model, diff)
    for field, value in diff.items():
        if value != getattr(model.config, field):
            check_field(model, diff, field)
    blueprint = build_like(model, config)
    check_heads(model, blueprint, grouped)
    check_multiples(model, blueprint, round_to)
    return blueprint


def _name(model: nn.Module, key: ModuleKey) -> str:
    names = {module: name for name, module in model.named_modules()}
    if key in names:
        return names[key]
    if isinstance(key, str) and key in names.values():
        return key
    shown = repr(key) if isinstance(key, str) else f"this {type(key).__name__}"
    raise ConfigurationError(
        f"{type(model).__name__} has no module {shown}.{near_names(str(key), names.values())} Pass names, or modules "
        "of the model itself."
    )


def _example_inputs(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, PreTrainedModel) and model.main_input_name == "input_ids":
        return {"input_ids": torch.zeros(1, 8, dtype=torch.long, device=model.device)}
    if isinstance(model, PreTrainedModel) and model.main_input_name == "pixel_values":
        size = getattr(model.config, "image_size", None) or 64
        height, width = (size, size) if isinstance(size, int) else size
        shape = (1, model.config.num_channels, height, width)
        return {"pixel_values": torch.zeros(shape, dtype=model.dtype, device=model.device)}
    raise ConfigurationError(
        f"prune_model has to run {type(model).__name__} once and cannot guess its inputs. Pass example_inputs: a "
        "tensor, a tuple, or a dict of keyword arguments."
    )


def _with_gradient(output: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]


def _transplant(pruned: nn.Module, blueprint: PreTrainedModel, diff: Mapping[str, Any]) -> PreTrainedModel:
    """Move the pruned weights into a model that was built with the wanted sizes."""
    state, wanted = pruned.state_dict(), blueprint.state_dict()
    wrong = [name for name, tensor in wanted.items() if name not in state or state[name].shape != tensor.shape]
    if wrong:
        name = wrong[0]
        reached = list(state[name].shape) if name in state else "missing"
        raise ConfigurationError(
            f"{type(pruned).__name__} cannot be pruned to {dict(diff)}: {name!r} should have the shape "
            f"{list(wanted[name].shape)}, but removing whole channels leads to {reached} ({len(wrong)} tensors "
            "differ). Change only fields that are widths of separate channels, or use reconfig_model."
        )
    blueprint.load_state_dict({name: state[name] for name in wanted})
    return blueprint


def _restore_flags(result: nn.Module, original: nn.Module, freeze_copied: bool) -> None:
    before = dict(original.named_parameters(remove_duplicate=False))
    same = {name for name, p in result.named_parameters(remove_duplicate=False) if before[name].shape == p.shape}
    frozen = {name for name, parameter in before.items() if not parameter.requires_grad}
    freeze_named(result, frozen | (same if freeze_copied else set()))


def _save(model: nn.Module, folder: Path) -> None:
    if isinstance(model, PreTrainedModel):
        save_model(model, folder)
        return
    from safetensors.torch import save_model as save_tensors

    folder.mkdir(parents=True, exist_ok=True)
    save_tensors(model, str(folder / "model.safetensors"))
    logger.info("Saved the state dict of the pruned %s to %s.", type(model).__name__, folder)

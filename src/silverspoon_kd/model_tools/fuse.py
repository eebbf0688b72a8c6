"""Put trained projectors and the module between them into one module."""

import dataclasses
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.errors import ConfigurationError


class ProjectedModule(nn.Module):
    """A module between two projectors, called like the module itself.

    The input projector is applied to the hidden state: the first positional argument, else ``hidden_states``, else the
    first tensor among the keyword arguments. The output projector is applied to a tensor, to element 0 of a tuple or
    list, or to the first tensor of a mapping; everything else is passed on unchanged.
    """

    def __init__(
        self, module: nn.Module, input_projector: nn.Module | None = None, output_projector: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self.input_projector = input_projector
        self.output_projector = output_projector

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what ``module`` returns, its hidden state projected."""
        if self.input_projector is not None:
            args, kwargs = _with_input(self.input_projector, args, kwargs)
        output = self.module(*args, **kwargs)
        return output if self.output_projector is None else _with_output(self.output_projector, output)


def fuse_projectors_into_module(
    module: nn.Module, input_projector: nn.Module | None = None, output_projector: nn.Module | None = None
) -> nn.Module:
    """Return a module that computes ``output_projector(module(input_projector(x)))``.

    Three linear maps in a row are one: where ``module`` and its projectors are ``nn.Linear``, the result is a single
    ``nn.Linear`` with weight ``W_out W W_in`` and bias ``W_out (W b_in + b) + b_out``, computed in float64. Any other
    module is wrapped in a :class:`ProjectedModule`, which keeps keyword arguments and further outputs.

    Args:
        module: What stands between the projectors; it is not changed, but a wrapper holds it, not a copy.
        input_projector: Applied before; None for nothing.
        output_projector: Applied after; None for nothing.

    Raises:
        ConfigurationError: The widths of linear layers do not fit.
    """
    if input_projector is None and output_projector is None:
        return module
    chain = [part for part in (input_projector, module, output_projector) if part is not None]
    linears = [part for part in chain if type(part) is nn.Linear]
    if len(linears) < len(chain):
        return ProjectedModule(module, input_projector, output_projector)
    for first, second in pairwise(linears):
        if first.out_features != second.in_features:
            raise ConfigurationError(
                f"A linear layer with {first.out_features} outputs was asked to feed one with {second.in_features} "
                "inputs. Pass the projectors that were trained with this module."
            )
    return _fold(linears, like=module.weight)  # type: ignore[arg-type]


@torch.no_grad()
def _fold(linears: list[nn.Linear], like: Tensor) -> nn.Linear:
    weight = linears[0].weight.double()
    bias = torch.zeros(weight.shape[0], dtype=weight.dtype, device=weight.device)
    bias = bias if linears[0].bias is None else linears[0].bias.double()
    for linear in linears[1:]:
        following = linear.weight.double().to(weight.device)
        weight, bias = following @ weight, following @ bias
        bias = bias if linear.bias is None else bias + linear.bias.double().to(bias.device)
    biased = any(linear.bias is not None for linear in linears)
    fused = nn.Linear(weight.shape[1], weight.shape[0], bias=biased, device=like.device, dtype=like.dtype)
    fused.weight.copy_(weight)
    if biased:
        fused.bias.copy_(bias)
    return fused


def _with_input(projector: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    if args and isinstance(args[0], Tensor):
        return (projector(args[0]), *args[1:]), kwargs
    key = "hidden_states" if isinstance(kwargs.get("hidden_states"), Tensor) else None
    key = key or next((word for word, value in kwargs.items() if isinstance(value, Tensor)), None)
    if key is None:
        raise ConfigurationError(
            f"The module was called with {len(args)} positional arguments and {sorted(kwargs)}, and none of them is a "
            "tensor to project. Pass the hidden state first or as hidden_states."
        )
    return args, {**kwargs, key: projector(kwargs[key])}


def _with_output(projector: nn.Module, output: Any) -> Any:
    if isinstance(output, Tensor):
        return projector(output)
    if isinstance(output, Mapping):
        key = next((key for key, value in output.items() if isinstance(value, Tensor)), None)
        if key is not None:
            changed = {**output, key: projector(output[key])}
            kind: Any = type(output)
            return kind(**changed) if dataclasses.is_dataclass(output) else kind(changed)
    if isinstance(output, tuple) and hasattr(output, "_fields"):
        return type(output)(projector(output[0]), *output[1:])
    if isinstance(output, list | tuple) and output and isinstance(output[0], Tensor):
        return type(output)([projector(output[0]), *output[1:]])
    raise ConfigurationError(
        f"The module returned a {type(output).__name__} without a tensor to project. Wrap it so that it returns one."
    )

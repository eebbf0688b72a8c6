"""Projectors are ordinary trainable modules of the student root, made with their final shape before any wrapping."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.errors import ConfigurationError

ProjectorInit = str | Callable[[nn.Module], Any] | None
"""None (torch's default), "normal" (std 0.02), "xavier", or a function of the projector."""


def build_projector(kind: str, in_features: int, out_features: int, bias: bool = True) -> nn.Module:
    """Return a projector.

    Args:
        kind: "linear" for ``[..., in_features]``, "conv2d" (1x1) for ``[batch, in_features, height, width]``.
        in_features: width of what comes in.
        out_features: width of what goes out.
        bias: add a bias.

    Raises:
        ConfigurationError: the kind is unknown.
    """
    if kind == "linear":
        return nn.Linear(in_features, out_features, bias=bias)
    if kind == "conv2d":
        return nn.Conv2d(in_features, out_features, kernel_size=1, bias=bias)
    raise ConfigurationError(f"A projector of kind {kind!r} was asked for; there are 'linear' and 'conv2d'.")


def projector_between(source: Tensor, target: Tensor, init: ProjectorInit) -> nn.Module | None:
    """Return the projector from the features of ``source`` to the width of ``target``, None where the widths agree.

    Only shapes and the dtype of ``source`` are used, so fake tensors do.
    """
    conv = source.dim() == 4 and target.dim() == 4
    axis = 1 if conv else -1
    if source.shape[axis] == target.shape[axis]:
        return None
    projector = build_projector("conv2d" if conv else "linear", source.shape[axis], target.shape[axis])
    initialise(projector, init)
    return projector.to(source.dtype)


def initialise(projector: nn.Module, init: ProjectorInit) -> None:
    """Initialise in place.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if callable(init):
        with torch.no_grad():
            init(projector)
        return
    fills: dict[str | None, Callable[[Tensor], Any]] = {
        None: lambda weight: weight,
        "normal": lambda weight: nn.init.normal_(weight, std=0.02),
        "xavier": nn.init.xavier_uniform_,
    }
    if init not in fills:
        raise ConfigurationError(
            f"projector_init={init!r} is unknown. Use None, 'normal' (std 0.02), 'xavier', or a function of the module."
        )
    for name, parameter in projector.named_parameters() if init is not None else ():
        if parameter.dim() > 1:
            fills[init](parameter)
        elif name.endswith("bias"):
            nn.init.zeros_(parameter)


def describe_projector(projector: nn.Module | None) -> dict[str, Any] | None:
    """Return what :func:`build_projector` needs for an equal one; ``{"kind": "custom"}`` for a user's own module."""
    if type(projector) is nn.Linear:
        return {
            "kind": "linear",
            "in": projector.in_features,
            "out": projector.out_features,
            "bias": projector.bias is not None,
        }
    if type(projector) is nn.Conv2d and projector.kernel_size == (1, 1):
        return {
            "kind": "conv2d",
            "in": projector.in_channels,
            "out": projector.out_channels,
            "bias": projector.bias is not None,
        }
    return None if projector is None else {"kind": "custom", "class": type(projector).__qualname__}


class AlignmentProjectors(nn.Module):
    """The projectors of one alignment: of the student block's input (blockwise) and of its output."""

    def __init__(self, input_projector: nn.Module | None, output_projector: nn.Module | None) -> None:
        super().__init__()
        self.input = input_projector
        self.output = output_projector

    def project_input(self, hidden: Tensor) -> Tensor:
        """Map the teacher's input to the student's width."""
        return hidden if self.input is None else self.input(_like(hidden, self.input))

    def project_output(self, features: Tensor) -> Tensor:
        """Map the student's output to the teacher's width."""
        return features if self.output is None else self.output(_like(features, self.output))


def _like(tensor: Tensor, module: nn.Module) -> Tensor:
    """Cast to the projector's own dtype: the teacher may be loaded in another one, and autocast decides for itself."""
    parameter = next(module.parameters(), None)
    return tensor if parameter is None or not tensor.is_floating_point() else tensor.to(parameter.dtype)

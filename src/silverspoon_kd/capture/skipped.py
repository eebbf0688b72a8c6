"""Layers between those that get their input from elsewhere: nobody needs what they would compute."""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from silverspoon_kd.capture.names import find_module
from silverspoon_kd.capture.probe import probe
from silverspoon_kd.capture.session import Capture, Tap, Trace, hidden_argument
from silverspoon_kd.errors import AlignmentError
from silverspoon_kd.tree import tensors_in

logger = logging.getLogger(__name__)


def find_skipped(
    model: nn.Module, blocks: Sequence[str], taps: Sequence[Tap], trace: Trace, inputs: Mapping[str, Any]
) -> dict[str, tuple[Any, ...] | None]:
    """Return which layers need not run if each of ``blocks`` gets its hidden states from elsewhere.

    They are neighbours of the blocks in a list of layers, without running statistics. Whether anything uses what they
    give out is tried: it is put on the meta device, where no other tensor can meet it, and what is recorded must not
    end up there.

    Args:
        model: left as it is.
        blocks: clean names of the modules with an input from elsewhere.
        taps: what is recorded.
        trace: what is known of the model's forward.
        inputs: a tiny batch as the model's forward takes it.

    Returns:
        By name what the layer gives out after its hidden states, None if it gives out nothing else.
    """
    names = list(_neighbours(model, blocks))
    if not names:
        return {}
    found, _ = probe(model, inputs, lambda forward: _passing_on(model, names, forward))
    home = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    enter = {name: lambda hidden: torch.empty_like(hidden, device=home) for name in blocks}

    def attempt(forward: Callable[[], Any]) -> bool:
        trial = Capture(model, taps, replace(trace, skipped=found), enter, stand_in=_on_meta)
        try:
            _, kept = trial.run(forward, may_stop=True)
        except Exception as error:  # whatever a forward does with a tensor that it cannot use
            logger.debug("The layers between the aligned ones of %s are needed: %s", type(model).__name__, error)
            return False
        for handle in kept:
            handle.remove()
        return not any(value.is_meta for value in trial.values.values())

    return found if found and probe(model, inputs, attempt)[0] else {}


def _neighbours(model: nn.Module, blocks: Sequence[str]) -> Iterator[str]:
    """Yield what comes before the last block in a list of layers and holds no block."""
    paths = [name.split(".") for name in blocks]
    holds = {".".join(path[:depth]) for path in paths for depth in range(1, len(path) + 1)}
    for parent in sorted(holds):
        layers = find_module(model, parent)
        if isinstance(layers, nn.ModuleList):
            names = [f"{parent}.{index}" for index in range(len(layers))]
            last = max((index for index, name in enumerate(names) if name in holds), default=0)
            for name, layer in zip(names[:last], layers, strict=False):
                if name not in holds and not _keeps_statistics(layer):
                    yield name


def _keeps_statistics(layer: nn.Module) -> bool:
    return any(getattr(module, "track_running_stats", False) for module in layer.modules())


def _passing_on(
    model: nn.Module, names: Sequence[str], forward: Callable[[], Any]
) -> dict[str, tuple[Any, ...] | None]:
    """Return those of ``names`` that give out hidden states of the kind they take in, and no other tensor."""
    found: dict[str, tuple[Any, ...] | None] = {}

    def compare(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            hidden, *others = output if isinstance(output, tuple) else (output,)
            try:
                _, _, given = hidden_argument(args, kwargs, name)
            except AlignmentError:  # called without a tensor
                return
            alike = isinstance(hidden, Tensor) and (hidden.shape, hidden.dtype) == (given.shape, given.dtype)
            if alike and not list(tensors_in(others)):
                found[name] = tuple(others) if isinstance(output, tuple) else None

        return hook

    with ExitStack() as stack:
        for name in names:
            handle = find_module(model, name).register_forward_hook(compare(name), with_kwargs=True)
            stack.callback(handle.remove)
        forward()
    return found


def _on_meta(hidden: Tensor) -> Tensor:
    return hidden.detach().to("meta")

"""A model whose blocks are on several devices, and what moves between these."""

from collections.abc import Sequence
from typing import Any

import torch
from accelerate import dispatch_model
from accelerate.hooks import AlignDevicesHook, ModelHook, SequentialHook
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from silverspoon_kd.capture import base_of
from silverspoon_kd.teacher.world.pipeline import pipeline_map
from silverspoon_kd.tree import map_tensors


def dispatch(teacher: nn.Module, devices: Sequence[str]) -> nn.Module:
    """Spread a model's blocks over ``devices``, in order, balanced by size."""
    # The names of the map are those of the model under an adapter's wrapper, which only calls it.
    dispatch_model(base_of(teacher), device_map=pipeline_map(teacher, devices), main_device=devices[0])
    move_once(teacher)
    return teacher


def move_once(teacher: nn.Module) -> None:
    """Let each tensor move once to each device of a dispatched model, and the output stay where it is.

    A copy between two devices makes each of them wait for what was launched on the other. The hooks of accelerate copy
    masks and rotary tables from the first device to every layer of the others, and the output back to the first device;
    then the first device can begin with the next micro-batch only when the last has finished this one.
    """
    base, copies = base_of(teacher), Copies()
    for name in getattr(base, "hf_device_map", {}):
        module = _find(base, name)
        hook = getattr(module, "_hf_hook", None)
        if module is not None and isinstance(hook, AlignDevicesHook) and hook.execution_device is not None:
            module._hf_hook = SequentialHook(_MoveOnce(copies, hook.execution_device), hook)
    hook = getattr(base, "_hf_hook", None)
    for each in getattr(hook, "hooks", [hook]):
        if isinstance(each, AlignDevicesHook):
            each.io_same_device = False


class Copies:
    """Copies of tensors on other devices, kept as long as the tensors themselves."""

    def __init__(self) -> None:
        self._kept: Any = WeakTensorKeyDictionary()

    def on(self, device: torch.device, tensor: Tensor) -> Tensor:
        """Return the tensor on ``device``."""
        if tensor.device == device or tensor.is_inference():
            return tensor
        copies: dict[torch.device, tuple[int, Tensor]] = self._kept.setdefault(tensor, {})
        if device not in copies or copies[device][0] != tensor._version:
            copies[device] = (tensor._version, tensor.to(device))
        return copies[device][1]


class _MoveOnce(ModelHook):
    def __init__(self, copies: Copies, device: str | int | torch.device) -> None:
        self._copies, self._device = copies, torch.device(device)

    def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[tuple, dict[str, Any]]:
        def move(tensor: Tensor) -> Tensor:
            return self._copies.on(self._device, tensor)

        return map_tensors(move, args), map_tensors(move, kwargs)


def _find(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:  # a parameter
        return None

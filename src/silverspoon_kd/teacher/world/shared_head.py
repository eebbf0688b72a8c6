"""One copy of the teacher's head for all processes of a node, handed over when the teacher is loaded.

The tensors lie in a file in memory: a loss on the CPU reads them there, one on an accelerator copies them once.
"""

from typing import Any

import torch
from torch import nn

from silverspoon_kd.teacher.head import Head, head_of
from silverspoon_kd.teacher.world.link import DTYPES, dtype_name
from silverspoon_kd.teacher.world.weights import SharedWeights, map_file, places_in, share_weights, strided_view


class SharedHead:
    """The head of a teacher that is still whole, which from now on uses it in the file if it is on the CPU.

    Args:
        teacher: the teacher.
    """

    def __init__(self, teacher: nn.Module) -> None:
        head = head_of(teacher)
        self._file: SharedWeights | None = None
        self.description: dict[str, Any] | None = None
        if head is None:
            return
        named = {name: tensor for name, tensor in (("weight", head.weight), ("bias", head.bias)) if tensor is not None}
        on_cpu = {
            name: tensor if tensor.device.type == "cpu" else tensor.detach().cpu() for name, tensor in named.items()
        }
        holder = nn.ParameterDict(on_cpu).requires_grad_(False)
        self._file = share_weights(holder)
        layouts = [(dtype_name(each.dtype), list(each.shape), list(each.stride())) for each in holder.parameters()]
        self.description = {
            "file": (self._file.path, self._file.nbytes),
            "tensors": dict(zip(named, zip(places_in(self._file, holder), layouts, strict=True), strict=True)),
        }

    def close(self) -> None:
        """Leave the file to those who have opened it."""
        if self._file is not None:
            self._file.close()


def open_head(description: dict[str, Any] | None) -> Head | None:
    """Return the head that another process of this node described."""
    if description is None:
        return None
    base = map_file(*description["file"])
    tensors: dict[str, torch.Tensor] = {
        name: strided_view(base, place, DTYPES[dtype], shape, stride)
        for name, (place, (dtype, shape, stride)) in description["tensors"].items()
    }
    return Head(tensors["weight"], tensors.get("bias"))

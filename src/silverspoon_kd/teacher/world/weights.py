"""How a module reaches other processes of its node without a second copy of its weights."""

import io
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn

from silverspoon_kd.host_memory import return_freed_memory


class SharedWeights:
    """A module's CPU tensors in an anonymous file in memory, which is gone when the last process closes it.

    Args:
        nbytes: size of the file.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = max(nbytes, mmap.PAGESIZE)
        self.fd = os.memfd_create("silverspoon_kd_teacher")
        os.ftruncate(self.fd, self.nbytes)
        self.base = map_file(f"/proc/self/fd/{self.fd}", self.nbytes)

    @property
    def path(self) -> str:
        """A path under which other processes of this user can open the file while this process lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def place_of(self, tensor: Tensor) -> int | None:
        """Return the byte at which a tensor starts in the file, None if it lies elsewhere."""
        start = tensor.data_ptr() - self.base.data_ptr()
        return start if 0 <= start < self.nbytes else None

    def close(self) -> None:
        """Let nobody else open the file; it lives on where it is mapped."""
        os.close(self.fd)


def map_file(path: str, nbytes: int) -> Tensor:
    """Return the bytes of a file as a uint8 tensor that shares its pages."""
    return torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8)


def share_weights(module: nn.Module) -> SharedWeights:
    """Move a module's CPU tensors into a :class:`SharedWeights`, one after the other; the module uses them there."""
    tensors = list(_cpu_tensors(module))
    places: dict[int, int] = {}
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in places:
            places[storage.data_ptr()] = total
            total += -(-storage.nbytes() // mmap.PAGESIZE) * mmap.PAGESIZE
    shared = SharedWeights(total)
    starts = [
        places[tensor.untyped_storage().data_ptr()] + int(tensor.storage_offset()) * tensor.element_size()
        for tensor in tensors
    ]
    kept = 0
    for tensor, start in zip(tensors, starts, strict=True):
        # The old memory goes before the next tensor needs new.
        tensor.data = _view(shared.base, start, tensor).copy_(tensor.detach())
        kept += tensor.numel() * tensor.element_size()
        if kept > total // 16:
            kept = 0
            return_freed_memory()
    return_freed_memory()
    return shared


def adopt_weights(module: nn.Module, path: str, nbytes: int, places: Sequence[int]) -> None:
    """Let an equal module of another process use the tensors of a :class:`SharedWeights`; its own are freed."""
    base = map_file(path, nbytes)
    for tensor, place in zip(_cpu_tensors(module), places, strict=True):
        tensor.data = _view(base, place, tensor)
    return_freed_memory()


def places_in(shared: SharedWeights, module: nn.Module) -> list[int]:
    """Return where each tensor of the module starts in the file, in the order of :func:`adopt_weights`."""
    return [place for place in map(shared.place_of, _cpu_tensors(module)) if place is not None]


def dump(value: Any, shared: SharedWeights | None) -> bytes:
    """Pickle a value; classes of the user's script go by value, tensors that live in ``shared`` as places in it."""
    buffer = io.BytesIO()
    _Pickler(buffer, shared).dump(value)
    return buffer.getvalue()


def load(data: bytes, path: str | None, nbytes: int) -> Any:
    """Read what :func:`dump` wrote; the tensors share the pages of the file at ``path``."""
    global _base
    _base = map_file(path, nbytes) if path else None
    try:
        return cloudpickle.loads(data)
    finally:
        _base = None


# The bytes that tensors are made from while `load` runs.
_base: Tensor | None = None


class _Pickler(cloudpickle.Pickler):
    def __init__(self, buffer: io.BytesIO, shared: SharedWeights | None) -> None:
        super().__init__(buffer)
        self._shared = shared

    def reducer_override(self, obj: Any) -> Any:
        if self._shared is not None and type(obj) in (Tensor, nn.Parameter):
            place = self._shared.place_of(obj) if obj.device.type == "cpu" and obj.numel() else None
            if place is not None:
                layout = (obj.dtype, tuple(obj.shape), obj.stride())
                return _rebuild, (place, *layout, isinstance(obj, nn.Parameter))
        return super().reducer_override(obj)


def _rebuild(place: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int], parameter: bool) -> Tensor:
    assert _base is not None, "the file with the weights was not given"
    view = strided_view(_base, place, dtype, size, stride)
    return nn.Parameter(view, requires_grad=False) if parameter else view


def _view(base: Tensor, place: int, like: Tensor) -> Tensor:
    return strided_view(base, place, like.dtype, like.shape, like.stride())


def strided_view(base: Tensor, place: int, dtype: torch.dtype, size: Sequence[int], stride: Sequence[int]) -> Tensor:
    """Return the tensor of this layout that starts at byte ``place`` of ``base``."""
    length = 1 + sum((count - 1) * step for count, step in zip(size, stride, strict=True))
    return base[place : place + length * dtype.itemsize].view(dtype).as_strided(tuple(size), tuple(stride))


def _cpu_tensors(module: nn.Module) -> Iterator[Tensor]:
    seen: set[int] = set()
    for tensor in [*module.parameters(), *module.buffers()]:
        plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.numel() > 0
        if plain and id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor

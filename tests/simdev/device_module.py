"""What ``torch.sim`` is: the functions that PyTorch, transformers and accelerate look for on a device's module."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

TOTAL_BYTES = 8 << 30
_native: ModuleType | None = None


def attach(library: ModuleType) -> None:
    """Use the compiled library, and offer its controls here: see :mod:`simdev.simdev`."""
    global _native
    _native = library
    for name in (
        "device_count current_device set_async set_race_check races set_op_delay_us sleep_ms stats sync_ops nometa"
    ).split():
        globals()[name] = getattr(library, name)


def native() -> ModuleType:
    """Return the compiled library."""
    assert _native is not None, "simdev.install() comes first"
    return _native


def index_of(device: Any = None) -> int:
    """Return the index of a device given as None (the current one), a number, a string or a torch.device."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return native().current_device() if index is None else index


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def set_device(device: Any) -> None:
    native().set_device(index_of(device))


def synchronize(device: Any = None) -> None:
    native().synchronize(index_of(device))


class device:
    """Make a device current inside a ``with``."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)

    def __enter__(self) -> None:
        self._before = native().current_device()
        native().set_device(self._index)

    def __exit__(self, *error: object) -> None:
        native().set_device(self._before)


# Random numbers are the host's.


def manual_seed(seed: int) -> None:
    pass


manual_seed_all = manual_seed


def get_rng_state(device: Any = None) -> torch.Tensor:
    return torch.default_generator.get_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    torch.default_generator.set_state(state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state()]


def set_rng_state_all(states: list[torch.Tensor]) -> None:
    set_rng_state(states[0])


# What the device can do and has.


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


def is_bf16_supported(*args: Any) -> bool:
    return True


def get_device_name(device: Any = None) -> str:
    return "sim"


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(name="sim", total_memory=TOTAL_BYTES)


def memory_allocated(device: Any = None) -> int:
    return native().memory(index_of(device))[0]


memory_reserved = memory_allocated


def max_memory_allocated(device: Any = None) -> int:
    return native().memory(index_of(device))[1]


def reset_peak_memory_stats(device: Any = None) -> None:
    torch.accelerator.reset_peak_memory_stats(index_of(device))


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL_BYTES - memory_allocated(device), TOTAL_BYTES


def empty_cache() -> None:
    pass


# Streams and events.


def Stream(device: Any = None, priority: int = 0) -> torch.Stream:
    return torch.Stream(device=torch.device("sim", index_of(device)), priority=priority)


def Event(enable_timing: bool = False, **kwargs: Any) -> torch.Event:
    return torch.Event(device="sim", enable_timing=enable_timing)


def current_stream(device: Any = None) -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", index_of(device)))


def default_stream(device: Any = None) -> torch.Stream:
    private_use = torch._C._autograd.DeviceType.PrivateUse1
    return torch.Stream(stream_id=0, device_index=index_of(device), device_type=int(private_use))


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def stream(stream: torch.Stream | None) -> AbstractContextManager:
    return nullcontext() if stream is None else stream

"""How many bytes a teacher will need on each device, worked out from shapes before it runs."""

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from silverspoon_kd.capture import Capture, InputView, Tap, Trace, base_of
from silverspoon_kd.capture.probe import fake_forward
from silverspoon_kd.teacher.world.dispatch import Copies
from silverspoon_kd.tree import map_tensors, tensors_in

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ForwardBytes:
    """What one forward needs beside the weights.

    Attributes:
        peak: most bytes that are held at any time, by device, inputs and recorded activations among them.
        signals: those of recorded activations, by device.
    """

    peak: Mapping[str, int]
    signals: Mapping[str, int]


class LiveBytes(TorchDispatchMode):
    """Count the bytes of the tensors made under it while they live.

    Attributes:
        peak: most bytes at any time by device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in tensors_in([args, kwargs]):
            self._note(tensor, 0)  # a weight, or a tensor of before
        result = func(*args, **kwargs)
        for tensor in tensors_in(result):
            self._note(tensor, tensor.untyped_storage().nbytes())
        return result

    def _note(self, tensor: Tensor, nbytes: int) -> None:
        storage = tensor.untyped_storage()
        key, device = storage._cdata, str(tensor.device)
        if key in self._known:
            return
        self._known.add(key)
        if nbytes:
            self._now[device] += nbytes
            self.peak[device] = max(self.peak[device], self._now[device])
        weakref.finalize(storage, self._freed, key, device, nbytes)

    def _freed(self, key: int, device: str, nbytes: int) -> None:
        self._known.discard(key)
        self._now[device] -= nbytes


def bytes_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor holds: of a sharded one the own share, of a quantised one its packed form.

    One that ZeRO-3 has emptied counts with the bytes it holds while it is gathered.
    """
    local = getattr(tensor, "_local_tensor", None)
    if local is not None:
        return bytes_of(local)
    inner = getattr(tensor, "__tensor_flatten__", None)
    if inner is not None:
        return sum(bytes_of(getattr(tensor, name)) for name in inner()[0])
    packed = getattr(tensor, "quant_state", None)
    extra = [] if packed is None else [value for value in vars(packed).values() if isinstance(value, Tensor)]
    return getattr(tensor, "ds_numel", tensor.numel()) * tensor.element_size() + sum(map(bytes_of, extra))


def weight_bytes(model: nn.Module, places: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return the bytes of parameters and buffers by device; tied ones count once.

    Args:
        model: only sizes are read.
        places: as for :func:`forward_bytes`.
    """
    found: Counter[str] = Counter()
    place = _placer(places)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        found[str(tensor.device if place is None else place(name, tensor))] += bytes_of(tensor)
    return dict(found)


def sharded_bytes(model: nn.Module, units: Sequence[nn.Module], num_ranks: int) -> tuple[int, int]:
    """Return the bytes of one rank's share of the weights and of what it gathers at most at a time.

    While a unit runs it lies there gathered and in the form in which it was received, beside what belongs to no unit.

    Args:
        model: not sharded yet.
        units: modules that are gathered at a time, inner ones first.
        num_ranks: each share is as large as the largest.
    """

    def share(parameter: Tensor) -> int:
        rows = parameter.shape[0] if parameter.dim() else 1
        return -(-rows // num_ranks) * (bytes_of(parameter) // max(rows, 1))

    seen: set[int] = set()

    def take(tensors: Iterable[Tensor]) -> list[Tensor]:
        new = [tensor for tensor in tensors if id(tensor) not in seen]
        seen.update(map(id, new))
        return new

    parts = [take(unit.parameters()) for unit in units]
    rest = take(model.parameters())
    shares = [num_ranks * sum(map(share, part)) for part in (*parts, rest)]
    held = sum(shares) // num_ranks + sum(map(bytes_of, model.buffers()))
    return held, shares[-1] + max(shares[-1], *(2 * each for each in shares[:-1]), 0)


def forward_bytes(
    teacher: nn.Module,
    taps: Sequence[Tap],
    trace: Trace,
    batch: Mapping[str, Any],
    rows: int,
    places: Mapping[str, str] | None,
    autocast: torch.dtype | None,
) -> ForwardBytes | None:
    """Find out what one forward needs by running it on fake tensors; None where that is impossible.

    Args:
        teacher: frozen, with its weights.
        taps: activations that will be recorded.
        trace: of an earlier forward, left as it is.
        batch: a batch of one row, of which the forward gets ``rows``.
        rows: of the batch.
        places: the device of each module (or parameter of the model itself) by name, in the order of the pipeline;
            None: where they are.
        autocast: dtype of mixed precision.
    """
    live, home = LiveBytes(), _home(teacher, places)
    length = max((len(tensor) for tensor in tensors_in(batch) if tensor.dim()), default=1)

    def widen(tensor: Tensor) -> Tensor:
        if not tensor.dim() or len(tensor) != length:
            return tensor.to(home)
        return tensor.new_empty((rows, *tensor.shape[1:]), device=home)

    def call(forward: Callable[[], Any]) -> Counter[str]:
        _route(teacher, places)
        capture = Capture(teacher, taps, trace)
        mixed = nullcontext() if autocast is None else torch.autocast(home.type, dtype=autocast)
        with torch.no_grad(), mixed:
            capture.run(forward, may_stop=True)
        kept = {value.untyped_storage()._cdata: value for value in capture.values.values()}
        signals: Counter[str] = Counter()
        for value in kept.values():
            signals[str(value.device)] += value.untyped_storage().nbytes()
        return signals

    if any(parameter.is_meta for parameter in teacher.parameters()):
        return None  # offloaded: its hooks load real weights
    try:
        inputs = InputView(teacher, "teacher")(batch)
        signals, _ = fake_forward(teacher, inputs, call, place=_placer(places), change=widen, watch=live)
    except Exception as error:
        logger.debug("The memory of a forward of %s is not known: %s", type(base_of(teacher)).__name__, error)
        return None
    return ForwardBytes(dict(live.peak), dict(signals))


def capacity(device: torch.device) -> int | None:
    """Return the bytes that a device has, None where it does not say."""
    ask = getattr(torch.accelerator, "get_memory_info", None)
    if device.type == "cpu" or ask is None:
        return None
    try:
        return int(ask(device)[1])
    except Exception as error:
        logger.debug("The memory of %s is not known: %s", device, error)
        return None


def _home(teacher: nn.Module, places: Mapping[str, str] | None) -> torch.device:
    if places:
        return torch.device(next(iter(places.values())))
    return next((tensor.device for tensor in teacher.parameters()), torch.device("cpu"))


def _placer(places: Mapping[str, str] | None) -> Callable[[str, Tensor], torch.device] | None:
    """Return what finds the device of a parameter: that of the longest name in ``places`` that leads to it."""
    if places is None:
        return None

    def place(name: str, tensor: Tensor) -> torch.device:
        while name not in places and name:
            name = name.rpartition(".")[0]
        return torch.device(places[name])

    return place


def _route(teacher: nn.Module, places: Mapping[str, str] | None) -> None:
    """Let each placed module move what it gets to its device once, as that of a dispatched model does."""
    modules, copies = dict(teacher.named_modules()), Copies()
    for name, device in (places or {}).items():
        if name in modules:
            modules[name].forward = _moving(modules[name].forward, copies, torch.device(device))


def _moving(forward: Callable, copies: Copies, device: torch.device) -> Callable:
    @functools.wraps(forward)
    def moved(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = map_tensors(partial(copies.on, device), (args, kwargs))
        return forward(*args, **kwargs)

    return moved

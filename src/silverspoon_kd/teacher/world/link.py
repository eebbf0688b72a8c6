"""The wire between student ranks and the teacher's processes on one node.

A process group of its own, made from a private store, so that the default groups on both sides stay what they are.
Student ranks come first (0..N-1), teacher processes follow (N..N+M-1). A message is a block of fixed size, which holds
a JSON text that describes it, and one buffer with the bytes of all its tensors, if there are any; all of a pair of
processes arrive in the order in which they were sent.

Tensors of an accelerator are staged in pinned host memory by a stream of their own. For each receiver a thread waits
until that is done, sends, and keeps the memory until it is taken: the forward that made the tensors goes on meanwhile.
"""

import json
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from silverspoon_kd.errors import TeacherError

T = TypeVar("T")

_BLOCK, _BUFFER = 1, 2
_BLOCK_BYTES = 1024
_LENGTHS = struct.Struct("=qq")  # of the text and of the buffer, in bytes
_ROOM = _BLOCK_BYTES - _LENGTHS.size  # a longer text begins the buffer
_ALIGNMENT = 64  # bytes
_FOREVER = timedelta(days=365)
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
    )
}


@dataclass(frozen=True)
class Message:
    """What arrived.

    Attributes:
        content: the JSON part.
        tensors: in the order in which they were sent, on CPU, views of one buffer.
        source: rank of the sender.
        seconds: that the tensors took to cross.
    """

    content: dict[str, Any]
    tensors: list[Tensor]
    source: int
    seconds: float = 0.0


@dataclass(frozen=True)
class _Parcel:
    """A message on its way: what it says, and the buffer, which is complete when the events are reached."""

    text: bytes
    buffer: Tensor | None
    events: Sequence[torch.Event]
    failed: Callable[[Exception], dict[str, Any]] | None


class Link:
    """One process's end of the wire.

    Args:
        store: shared by all processes of the link.
        rank: own rank in the link.
        size: processes of the link; all must take part.
        join_timeout: longest wait for the other processes, in seconds.
        timeout: longest wait for a message, in seconds; None: for ever.
        pinned: receive into pinned memory, from which an accelerator copies without being waited for.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        join_timeout: float,
        timeout: float | None,
        *,
        pinned: bool = False,
    ) -> None:
        self.rank, self.size, self._pinned = rank, size, pinned
        self._timeout = _FOREVER if timeout is None else timedelta(seconds=timeout)
        joining = timedelta(seconds=join_timeout)
        self._group: Any = dist.ProcessGroupGloo(PrefixStore("silverspoon_kd/link", store), rank, size, joining)
        self._group.set_timeout(self._timeout)
        self._streams: dict[torch.device, torch.Stream] = {}
        self._outboxes: dict[int, SimpleQueue[_Parcel | None]] = {}
        self._broken: Exception | None = None

    def send(
        self,
        to: int,
        content: dict[str, Any],
        tensors: Sequence[Tensor] = (),
        failed: Callable[[Exception], dict[str, Any]] | None = None,
    ) -> None:
        """Start sending a message; waits neither for the receiver nor for an accelerator.

        Args:
            to: rank of the receiver.
            content: as JSON takes it.
            tensors: of any device; not changed until they are received.
            failed: what to send in place of the message if the work that makes the tensors fails on its device.

        Raises:
            RuntimeError: an earlier message could not be sent.
        """
        if self._broken is not None:
            raise RuntimeError("An earlier message could not be sent.") from self._broken
        described = {**content, "tensors": [[dtype_name(each.dtype), list(each.shape)] for each in tensors]}
        text = json.dumps(described).encode()
        buffer, events = self._pack(text if len(text) > _ROOM else b"", [each.detach() for each in tensors])
        if to not in self._outboxes:
            self._outboxes[to] = SimpleQueue()
            threading.Thread(target=self._deliver, args=(to, self._outboxes[to]), daemon=True).start()
        self._outboxes[to].put(_Parcel(text, buffer, events, failed))

    def receive(self, source: int | None = None) -> Message:
        """Wait for a message, from ``source`` or from anybody.

        Raises:
            RuntimeError: the other side is gone, or the time is over.
        """
        block = bytearray(_BLOCK_BYTES)
        header = torch.frombuffer(block, dtype=torch.uint8)
        if source is None:
            work = self._group.recv_anysource([header], _BLOCK)
            work.wait()
            source = work._source_rank()
        else:
            self._group.recv([header], source, _BLOCK).wait(self._timeout)
        begun = time.perf_counter()
        length, nbytes = _LENGTHS.unpack_from(block)
        buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned)
        if nbytes:
            self._group.recv([buffer], source, _BUFFER).wait(self._timeout)
        seconds = time.perf_counter() - begun
        inside = length > _ROOM
        text = buffer[:length].numpy().tobytes() if inside else block[_LENGTHS.size : _LENGTHS.size + length]
        content = json.loads(text)
        return Message(content, _views(buffer, content.pop("tensors"), length if inside else 0), source, seconds)

    def close(self) -> None:
        """End the threads that send."""
        for outbox in self._outboxes.values():
            outbox.put(None)

    def _pack(self, text: bytes, tensors: Sequence[Tensor]) -> tuple[Tensor | None, list[torch.Event]]:
        """Return the buffer of a message that begins with ``text``, and the events after which it is complete."""
        whole = [each for each in tensors if each.numel()]
        if not text and len(whole) == 1 and whole[0].device.type == "cpu" and whole[0].is_contiguous():
            return whole[0].view(-1).view(torch.uint8), []
        places, total = _places([each.nbytes for each in tensors], len(text))
        if total == 0:
            return None, []
        staged = any(each.device.type != "cpu" for each in whole)
        buffer = torch.empty(total, dtype=torch.uint8, pin_memory=staged)
        if text:
            buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        events = []
        for each, place in zip(tensors, places, strict=True):
            target = buffer[place : place + each.nbytes].view(each.dtype).view(each.shape) if each.numel() else each
            if each.numel() and each.device.type == "cpu":
                target.copy_(each)
            elif each.numel():
                events.append(self._copy_out(each, target))
        return buffer, events

    def _copy_out(self, tensor: Tensor, target: Tensor) -> torch.Event:
        """Start copying to pinned memory behind what made the tensor, and return the event of the end."""
        device = tensor.device
        if device not in self._streams:
            self._streams[device] = torch.Stream(device=device)
        stream = self._streams[device]
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            target.copy_(tensor, non_blocking=True)
        tensor.record_stream(stream)
        return stream.record_event()

    def _deliver(self, to: int, outbox: "SimpleQueue[_Parcel | None]") -> None:
        try:
            while (parcel := outbox.get()) is not None:
                parcel = self._completed(parcel)
                block, buffer = _block(parcel), parcel.buffer
                sent = [self._group.send([torch.frombuffer(block, dtype=torch.uint8)], to, _BLOCK)]
                if buffer is not None:
                    sent.append(self._group.send([buffer], to, _BUFFER))
                for work in sent:
                    work.wait(_FOREVER)
                del parcel, buffer, sent, work  # the next one may be long in coming
        except Exception as error:
            self._broken = error

    def _completed(self, parcel: _Parcel) -> _Parcel:
        """Return the message when its copies are done, or the one that tells why they never will be."""
        try:
            for event in parcel.events:
                event.synchronize()
        except Exception as error:
            if parcel.failed is None:
                raise
            text = json.dumps({**parcel.failed(error), "tensors": []}).encode()
            buffer, _ = self._pack(text if len(text) > _ROOM else b"", [])
            return _Parcel(text, buffer, [], None)
        return parcel


def interruptible(wait: Callable[[], T]) -> T:
    """Return what ``wait`` returns, and let Ctrl-C through meanwhile: inside a wait of the wire nobody hears it."""
    outcomes: SimpleQueue[tuple[T | None, BaseException | None]] = SimpleQueue()

    def run() -> None:
        try:
            outcomes.put((wait(), None))
        except BaseException as error:
            outcomes.put((None, error))

    threading.Thread(target=run, daemon=True).start()
    value, failure = outcomes.get()
    if failure is not None:
        raise failure
    return value  # type: ignore[return-value]


def _block(parcel: _Parcel) -> bytearray:
    block = bytearray(_BLOCK_BYTES)
    _LENGTHS.pack_into(block, 0, len(parcel.text), 0 if parcel.buffer is None else parcel.buffer.numel())
    if len(parcel.text) <= _ROOM:
        block[_LENGTHS.size : _LENGTHS.size + len(parcel.text)] = parcel.text
    return block


def _places(sizes: Sequence[int], start: int) -> tuple[list[int], int]:
    """Return where parts of these sizes begin in a buffer behind ``start`` bytes, and the size of the buffer."""
    places, end = [], start
    for size in sizes:
        begin = -(-end // _ALIGNMENT) * _ALIGNMENT if size else end
        places.append(begin)
        end = begin + size
    return places, end


def _views(buffer: Tensor, described: Sequence[tuple[str, list[int]]], start: int) -> list[Tensor]:
    shapes = [(torch.Size(shape), DTYPES[name]) for name, shape in described]
    sizes = [shape.numel() * dtype.itemsize for shape, dtype in shapes]
    return [
        buffer[place : place + size].view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)
        for (shape, dtype), size, place in zip(shapes, sizes, _places(sizes, start)[0], strict=True)
    ]


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name under which a dtype is sent.

    Raises:
        TeacherError: it is not among those that can be sent.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise TeacherError(
            f"A tensor of dtype {name} cannot be sent to or from the teacher. Use one of {sorted(DTYPES)}."
        )
    return name

"""The wire between student ranks and the teacher's processes on one node.

A process group of its own, made from a private store, so that the default groups on both sides stay what they are.
Student ranks come first (0..N-1), teacher processes follow (N..N+M-1). A message is a fixed header, a JSON text that
describes it, and its tensors; all of a pair of processes arrive in the order in which they were sent.
"""

import json
import threading
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

_HEADER, _TEXT, _TENSOR = 1, 2, 3
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
        tensors: in the order in which they were sent, on CPU.
        source: rank of the sender.
    """

    content: dict[str, Any]
    tensors: list[Tensor]
    source: int


class Link:
    """One process's end of the wire.

    Args:
        store: shared by all processes of the link.
        rank: own rank in the link.
        size: processes of the link; all must take part.
        join_timeout: longest wait for the other processes, in seconds.
        timeout: longest wait for a message, in seconds; None: for ever.
    """

    def __init__(self, store: Store, rank: int, size: int, join_timeout: float, timeout: float | None) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(days=365) if timeout is None else timedelta(seconds=timeout)
        joining = timedelta(seconds=join_timeout)
        self._group: Any = dist.ProcessGroupGloo(PrefixStore("silverspoon_kd/link", store), rank, size, joining)
        self._group.set_timeout(self._timeout)
        # A tensor must live until the other side has taken it.
        self._in_flight: list[tuple[dist.Work, Tensor]] = []

    def send(self, to: int, content: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        """Start sending a message; does not wait for the receiver."""
        parts = [_contiguous_on_cpu(tensor) for tensor in tensors]
        described = {**content, "tensors": [[dtype_name(part.dtype), list(part.shape)] for part in parts]}
        text = torch.frombuffer(bytearray(json.dumps(described).encode()), dtype=torch.uint8)
        self._start(to, torch.tensor([len(text)], dtype=torch.int64), _HEADER)
        self._start(to, text, _TEXT)
        for part in parts:
            if part.numel():
                self._start(to, part.flatten().view(torch.uint8), _TENSOR)
        self._forget_sent()

    def receive(self, source: int | None = None) -> Message:
        """Wait for a message, from ``source`` or from anybody.

        Raises:
            RuntimeError: the other side is gone, or the time is over.
        """
        header = torch.zeros(1, dtype=torch.int64)
        if source is None:
            work = self._group.recv_anysource([header], _HEADER)
            work.wait()
            source = work._source_rank()
        else:
            self._group.recv([header], source, _HEADER).wait(self._timeout)
        text = torch.empty(int(header), dtype=torch.uint8)
        self._group.recv([text], source, _TEXT).wait(self._timeout)
        content = json.loads(bytes(text.tolist()).decode())
        tensors = []
        for name, shape in content.pop("tensors"):
            tensor = torch.empty(shape, dtype=DTYPES[name])
            if tensor.numel():
                self._group.recv([tensor.view(-1).view(torch.uint8)], source, _TENSOR).wait(self._timeout)
            tensors.append(tensor)
        return Message(content, tensors, source)

    def _start(self, to: int, tensor: Tensor, tag: int) -> None:
        self._in_flight.append((self._group.send([tensor], to, tag), tensor))

    def _forget_sent(self) -> None:
        self._in_flight = [(work, tensor) for work, tensor in self._in_flight if not work.is_completed()]


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


def _contiguous_on_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu").contiguous()


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

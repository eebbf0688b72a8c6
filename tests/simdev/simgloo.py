"""A process group for tensors of simulated devices: they are staged through host memory, and gloo does the work.

Use it as ``dist.init_process_group("simgloo")`` after :func:`simdev.simdev.install`. Every collective waits until it is
done: what overlaps on a real device does not overlap here.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch.futures import Future

NAME = "simgloo"


class _Staging:
    """Copies of device tensors on the host, one for each tensor however often it is asked for."""

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "cpu":
            return tensor
        if id(tensor) not in self._copies:
            self._copies[id(tensor)] = tensor.detach().cpu()
        return self._copies[id(tensor)]

    @torch.no_grad()
    def bring_back(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            if id(tensor) in self._copies:
                tensor.detach().copy_(self._copies[id(tensor)])


class StagedGroup(dist.ProcessGroup):
    """What ``torch.distributed`` calls. Methods and their arguments are those of ``ProcessGroup``."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self._rank, self._size, self._name = rank, size, ""

    def getBackendName(self) -> str:
        return NAME

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllreduceOptions()
        return self._run(lambda host: self._gloo.allreduce(list(map(host, tensors)), opts), tensors, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        each = c10d.AllreduceOptions()
        each.reduceOp = opts.reduceOp
        for tensor in tensors:
            self.allreduce([tensor], each)
        return _finished(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.BroadcastOptions()
        return self._run(lambda host: self._gloo.broadcast(list(map(host, tensors)), opts), tensors, tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()

        def work(host: _Staging) -> dist.Work:
            return self._gloo.allgather([list(map(host, each)) for each in outputs], list(map(host, inputs)), opts)

        return self._run(work, _flat(outputs), outputs)

    def _allgather_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or c10d.AllgatherOptions()
        return self._run(lambda host: self._gloo._allgather_base(host(output), host(source), opts), [output], output)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any = None, *rest: Any) -> dist.Work:
        return self._allgather_base(output, source, opts)

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, source in zip(outputs, sources, strict=True):
            self._allgather_base(output, source)
        return _finished(outputs)

    def _reduce_scatter_base(self, output: Tensor, source: Tensor, opts: Any = None) -> dist.Work:
        opts = opts or c10d.ReduceScatterOptions()
        return self._run(
            lambda host: self._gloo._reduce_scatter_base(host(output), host(source), opts), [output], output
        )

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any = None, *rest: Any) -> dist.Work:
        return self._reduce_scatter_base(output, source, opts)

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], sources: list[Tensor], opts: Any = None
    ) -> dist.Work:
        for output, source in zip(outputs, sources, strict=True):
            self._reduce_scatter_base(output, source, opts)
        return _finished(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None) -> dist.Work:
        def work(host: _Staging) -> dist.Work:
            return self._gloo.scatter(list(map(host, outputs)), [list(map(host, each)) for each in inputs], opts)

        return self._run(work, outputs, outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> dist.Work:
        def work(host: _Staging) -> dist.Work:
            return self._gloo.gather([list(map(host, each)) for each in outputs], list(map(host, inputs)), opts)

        return self._run(work, _flat(outputs), outputs)

    def alltoall_base(
        self, output: Tensor, source: Tensor, output_sizes: list[int], input_sizes: list[int], opts: Any = None
    ) -> dist.Work:
        opts = opts or c10d.AllToAllOptions()

        def work(host: _Staging) -> dist.Work:
            return self._gloo.alltoall_base(host(output), host(source), output_sizes, input_sizes, opts)

        return self._run(work, [output], output)

    def send(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._run(lambda host: self._gloo.send(list(map(host, tensors)), rank, tag), [], tensors)

    def recv(self, tensors: list[Tensor], rank: int, tag: int = 0) -> dist.Work:
        return self._run(lambda host: self._gloo.recv(list(map(host, tensors)), rank, tag), tensors, tensors)

    def barrier(self, opts: Any = None) -> dist.Work:
        return self._gloo.barrier(opts or c10d.BarrierOptions())

    def _run(self, work: Callable[[_Staging], dist.Work], outputs: list[Tensor], result: Any) -> dist.Work:
        """Do it on the host, copy ``outputs`` back, and return finished work whose future holds ``result``."""
        staging = _Staging()
        work(staging).wait()
        staging.bring_back(outputs)
        return _finished(result)


def _flat(lists: list[list[Tensor]]) -> list[Tensor]:
    return [tensor for each in lists for tensor in each]


def _finished(result: Any) -> dist.Work:
    future: Future = Future()
    future.set_result(result)
    return c10d._create_work_from_future(future)


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> StagedGroup:
    return StagedGroup(store, rank, size, timeout)


dist.Backend.register_backend(NAME, _create, extended_api=False, devices=["cpu", "sim"])

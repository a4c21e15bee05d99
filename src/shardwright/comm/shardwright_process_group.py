"""A process group of torch.distributed with Shardwright's collectives.

What they do not cover (send, receive, gather, scatter, all-to-all, barrier, sparse tensors) gloo does.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]
from torch.futures import Future

from shardwright.comm._private import gloo_group
from shardwright.comm.backend import BACKEND
from shardwright.comm.collective_work import CollectiveWork
from shardwright.comm.connect import connect
from shardwright.comm.reduction import Reduction
from shardwright.errors import UsageError

__all__ = ["ShardwrightProcessGroup"]


# The stubs name some methods otherwise than C++ does, and leave out the constructor.
_ProcessGroup: Any = dist.ProcessGroup


class ShardwrightProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group with Shardwright's collectives.

    Args:
        store: of its ranks alone.
        rank: of this process in the group.
        num_ranks: of the group.
        timeout: how long to wait for a rank at most.

    Attributes:
        communicator: the collectives.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int, timeout: timedelta):
        super().__init__(rank, num_ranks)
        timeout_s = timeout.total_seconds()
        self._gloo = gloo_group(PrefixStore("gloo", store), rank, num_ranks, timeout_s=timeout_s)
        self.communicator = connect(store, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s)
        self._name = self._description = ""

    # ---- what torch.distributed asks a group ----

    def getBackendName(self) -> str:
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def group_desc(self) -> str:
        return self._description

    def shutdown(self) -> None:
        self.communicator.close()

    def abort(self) -> None:
        self.communicator.close()

    # ---- collectives of Shardwright ----

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return self._gloo.allreduce(list(tensors), opts)
        reduction = Reduction.of(opts.reduceOp)
        flat = [_flat(tensor, "all_reduce") for tensor in tensors]

        def task() -> list[Tensor]:
            for tensor in flat:
                self.communicator.all_reduce(tensor, reduction)
            return list(tensors)

        return self._work(task, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        flat = [_flat(tensor, "broadcast") for tensor in tensors]

        def task() -> list[Tensor]:
            for tensor in flat:
                self.communicator.broadcast(tensor, opts.rootRank)
            return list(tensors)

        return self._work(task, opts)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        data = [_contiguous(tensor) for tensor in inputs]

        def task() -> list[Tensor]:
            for received, sent in zip(outputs, data, strict=True):
                whole = sent.new_empty(len(received) * sent.numel())
                self.communicator.all_gather(whole, sent)
                for target, part in zip(received, whole.chunk(len(received)), strict=False):
                    target.copy_(part.view(target.shape))
            return [tensor for received in outputs for tensor in received]

        return self._work(task, opts)

    def all_gather_single(self, output: Tensor, data: Tensor, opts: Any = None) -> dist.Work:
        return self.all_gather_single_coalesced([output], [data], opts)

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        data = [_contiguous(tensor) for tensor in inputs]

        def task() -> list[Tensor]:
            for output, tensor in zip(outputs, data, strict=True):
                self.communicator.all_gather(output, tensor)
            return list(outputs)

        return self._work(task, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        data = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, data, opts)

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        reduction = Reduction.of(opts.reduceOp)
        data = [_contiguous(tensor) for tensor in inputs]

        def task() -> list[Tensor]:
            for output, tensor in zip(outputs, data, strict=True):
                self.communicator.reduce_scatter(output, tensor, reduction)
            return list(outputs)

        return self._work(task, opts)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _work(self, task: Callable[[], list[Tensor]], opts: Any) -> dist.Work:
        thread = self.communicator.thread
        if opts is not None and not opts.asyncOp:
            done: Future[list[Tensor]] = Future()
            done.set_result(thread.run(task))
            return CollectiveWork(done)
        return CollectiveWork(thread.submit(task))

    # ---- what gloo does ----

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._gloo.allgather_coalesced(outputs, inputs, opts or AllgatherOptions())

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._gloo.alltoall(outputs, inputs, opts or dist.AllToAllOptions())

    def all_to_all_single(
        self, output: Tensor, data: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        return self._gloo.alltoall_base(output, data, output_sizes, input_sizes, opts)

    alltoall_base = all_to_all_single

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._gloo.reduce(tensors, opts or dist.ReduceOptions())

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._gloo.gather(outputs, inputs, opts or dist.GatherOptions())

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._gloo.scatter(outputs, inputs, opts or dist.ScatterOptions())

    def barrier(self, opts: Any = None) -> dist.Work:
        # Behind all collectives that were asked for before.
        self.communicator.thread.run(lambda: None)
        return self._gloo.barrier(opts or dist.BarrierOptions())

    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        return self._gloo.send(tensors, target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        return self._gloo.recv(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._gloo.recv_anysource(tensors, tag)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


def _flat(tensor: Tensor, kind: str) -> Tensor:
    """The elements of a tensor as they lie in memory, which must be the same way on all ranks."""
    if not tensor.numel():
        return tensor.detach().view(-1)
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    expected = 1
    for stride, size in sorted(zip(plain.stride(), plain.shape, strict=True)):
        if size != 1 and stride != expected:
            raise UsageError(
                f"{kind} takes tensors without holes, but this one of shape {tuple(tensor.shape)} has the "
                f"strides {tensor.stride()}. Pass a contiguous copy."
            )
        expected *= size
    return plain.detach().as_strided((plain.numel(),), (1,))

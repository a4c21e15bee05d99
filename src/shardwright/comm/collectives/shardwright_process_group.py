"""A torch.distributed process group with Shardwright's collectives.

Operations that they do not cover (send, receive, gather, scatter, all-to-all, barrier, sparse tensors) go to
gloo for tensors on the CPU, and to NCCL for tensors on CUDA devices.

::

    hop 1   reduce-scatter inside of the shard group     every rank gets the sum of its own part
    hop 2   all-reduce of that part over the replicas    of other shard groups

The second hop carries 1 / shard of the data of an all-reduce over all ranks, and overlaps the next first hop:
each hop has its own thread and, mostly, its own links.
"""

from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]
from torch.futures import Future

from shardwright.collectives.prices import typical_device_prices
from shardwright.comm._private import gloo_group, reduce_scatter_single
from shardwright.comm.collectives.connect import connect
from shardwright.comm.collectives.device_collectives import DeviceCollectives
from shardwright.comm.collectives.device_lanes import CUDA, Accelerator
from shardwright.comm.collectives.ordered_thread import CollectiveWork
from shardwright.comm.collectives.reduction import Reduction
from shardwright.comm.message_names import BACKEND
from shardwright.comm.tensor_codec import flat
from shardwright.errors import UsageError

# The stubs name some methods otherwise than C++ does, and leave out the constructor.
_ProcessGroup: Any = dist.ProcessGroup


class ShardwrightProcessGroup(_ProcessGroup):  # type: ignore[misc]
    """A process group with Shardwright's collectives."""

    def __init__(
        self,
        store: Store,
        rank: int,
        num_ranks: int,
        timeout: timedelta,
        *,
        accelerator: Accelerator = CUDA,
    ):
        super().__init__(rank, num_ranks)
        timeout_s = timeout.total_seconds()
        store = _of_this_life(store, num_ranks)
        self._gloo = gloo_group(PrefixStore("gloo", store), rank, num_ranks, timeout_s=timeout_s)
        world_rank = dist.get_rank() if dist.is_initialized() else rank
        self.communicator = connect(
            store, rank=rank, num_ranks=num_ranks, timeout_s=timeout_s, world_rank=world_rank
        )
        topology = self.communicator.topology
        self._accelerator = accelerator
        self.devices = DeviceCollectives(
            PrefixStore("devices", store),
            rank=rank,
            topology=topology,
            prices=self.communicator.prices.devices or typical_device_prices(topology),
            accelerator=accelerator,
            thread=self.communicator.thread,
            timeout_s=timeout_s,
        )
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

    @property
    def _device_types(self) -> list[torch.device]:
        # The CPU first: torch.distributed sends objects there.
        present = [self._accelerator.device_type] if self._accelerator.is_present() else []
        return [torch.device(kind) for kind in dict.fromkeys(["cpu", *present])]

    def _get_backend(self, device: torch.device | str) -> Any:
        # The group stays unbound from any device: torch.distributed would have NCCL split the communicator of
        # a bound one, for which its ranks would wait in vain where new groups are of this backend.
        device = torch.device(device)
        on_device = device.type == self._accelerator.device_type
        return (self.devices.everyone if on_device else self._gloo)._get_backend(device)

    def shutdown(self) -> None:
        self.communicator.close()
        self.devices.shutdown()

    def abort(self) -> None:
        self.communicator.close()
        self.devices.abort()

    # ---- collectives of Shardwright ----

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        opts = opts or dist.AllreduceOptions()
        if self._on_device(tensors):
            return self.devices.all_reduce(list(tensors), opts)
        if any(tensor.layout is not torch.strided for tensor in tensors):
            return self._gloo.allreduce(list(tensors), opts)
        reduction = Reduction.of(opts.reduceOp)
        elements = [flat(tensor, "all_reduce") for tensor in tensors]
        return self._each("all_reduce", elements, elements, opts, reduction=reduction, results=tensors)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        if self._on_device(tensors):
            return self.devices.broadcast(list(tensors), opts)
        elements = [flat(tensor, "broadcast") for tensor in tensors]
        return self._each("broadcast", elements, elements, opts, source=opts.rootRank, results=tensors)

    def allgather(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        if self._on_device(inputs):
            received = [list(parts) for parts in outputs]
            return self.devices.everyone.allgather(received, list(inputs), opts or AllgatherOptions())
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
        if self._on_device(inputs):
            return self.devices.all_gather(list(outputs), data, opts or AllgatherOptions())
        return self._each("all_gather", outputs, data, opts)

    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        if self._on_device(outputs):
            sent = [list(parts) for parts in inputs]
            opts = opts or dist.ReduceScatterOptions()
            return self.devices.everyone.reduce_scatter(list(outputs), sent, opts)
        data = [torch.cat([part.reshape(-1) for part in parts]) for parts in inputs]
        return self.reduce_scatter_single_coalesced(outputs, data, opts)

    def reduce_scatter_single(self, output: Tensor, data: Tensor, opts: Any = None) -> dist.Work:
        return self.reduce_scatter_single_coalesced([output], [data], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.ReduceScatterOptions()
        data = [_contiguous(tensor) for tensor in inputs]
        if self._on_device(inputs):
            return self.devices.reduce_scatter(list(outputs), data, opts)
        reduction = Reduction.of(opts.reduceOp)
        return self._each("reduce_scatter", outputs, data, opts, reduction=reduction)

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _each(
        self,
        collective: str,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Any,
        *,
        results: Sequence[Tensor] | None = None,
        **how: Any,
    ) -> dist.Work:
        """A collective of each of some tensors; of a single one, by gloo where that does it better."""
        if len(inputs) == 1:
            output, data = outputs[0].detach(), inputs[0].detach()
            work = self.communicator.start_gloo(self._gloo, collective, output, data, **how)
            if work is not None:
                return work

        def task() -> list[Tensor]:
            for output, data in zip(outputs, inputs, strict=True):
                self.communicator.run(collective, data, output, **how)
            return list(outputs if results is None else results)

        return self._work(task, opts)

    def _work(self, task: Callable[[], list[Tensor]], opts: Any) -> dist.Work:
        thread = self.communicator.thread
        if opts is not None and not opts.asyncOp:
            done: Future[list[Tensor]] = Future()
            done.set_result(thread.run(task))
            return CollectiveWork(done)
        return CollectiveWork(thread.submit(task))

    def _on_device(self, tensors: Iterable[Tensor]) -> bool:
        """Whether tensors are on the accelerator, and not on the CPU."""
        found = {tensor.device.type for tensor in tensors}
        if found == {self._accelerator.device_type}:
            return True
        if found <= {"cpu"}:
            return False
        raise UsageError(
            f"a {BACKEND} group takes tensors on the CPU or on {self._accelerator.device_type}, those of one "
            f"call on one of them, but these are on {' and '.join(sorted(found))}. Move some of them."
        )

    # ---- what gloo and NCCL do ----

    def _stock(self, tensors: Iterable[Tensor]) -> dist.ProcessGroup:
        return self.devices.everyone if self._on_device(tensors) else self._gloo

    def allgather_coalesced(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._stock(inputs).allgather_coalesced(outputs, inputs, opts or AllgatherOptions())

    def alltoall(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._stock(outputs).alltoall(outputs, inputs, opts or dist.AllToAllOptions())

    def all_to_all_single(
        self, output: Tensor, data: Tensor, output_sizes: Any, input_sizes: Any, opts: Any = None
    ) -> dist.Work:
        opts = opts or dist.AllToAllOptions()
        return self._stock([output]).alltoall_base(output, data, output_sizes, input_sizes, opts)

    alltoall_base = all_to_all_single

    def reduce(self, tensors: Any, opts: Any = None) -> dist.Work:
        return self._stock(tensors).reduce(tensors, opts or dist.ReduceOptions())

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._stock(inputs).gather(outputs, inputs, opts or dist.GatherOptions())

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> dist.Work:
        return self._stock(outputs).scatter(outputs, inputs, opts or dist.ScatterOptions())

    def barrier(self, opts: Any = None) -> dist.Work:
        opts = opts or dist.BarrierOptions()
        if opts.device is not None and opts.device.type == self._accelerator.device_type:
            return self.devices.barrier(opts)
        # Behind all collectives that were asked for before.
        self.communicator.thread.run(lambda: None)
        return self._gloo.barrier(opts)

    def send(self, tensors: Any, target: int, tag: int = 0) -> dist.Work:
        return self._stock(tensors).send(tensors, target, tag)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> dist.Work:
        return self._stock(tensors).recv(tensors, source, tag)

    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        return self._stock(tensors).recv_anysource(tensors, tag)


def _of_this_life(store: Store, num_ranks: int) -> Store:
    """The store under a prefix that no earlier group of its name has used.

    torch.distributed gives the group after a `destroy_process_group` the name, and so the keys, of the one
    before. No rank can have joined a group before all have counted themselves, so who is still leaving it
    was counted already. Each size counts its own: a later group of this name may have other ranks.
    """
    life = (store.add(f"lives of {num_ranks}", 1) - 1) // num_ranks
    return PrefixStore(f"{num_ranks}/{life}", store)


def _contiguous(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous()


class TwoHopSum:
    """Starts to sum; the groups' other collectives may follow at once."""

    def __init__(
        self,
        data: Tensor,
        *,
        earlier: Tensor | None,
        shard_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
    ):
        self._earlier = earlier
        self._sum = data.new_empty(data.numel() // dist.get_world_size(shard_group))
        self._replica_group = replica_group
        self._first: Any = reduce_scatter_single(self._sum, data, group=shard_group, async_op=True)
        self._both: Future[Any] | None = None
        if isinstance(replica_group, ShardwrightProcessGroup) and data.device.type == "cpu":
            # Its thread keeps the order in which the first hops end, which is the same on all ranks.
            replicas = replica_group.communicator

            def hop(first: "Future[Any]") -> "Future[Any]":
                first.value()
                return replicas.thread.submit(second)

            def second() -> None:
                self._add_earlier()
                replicas.all_reduce(self._sum)

            self._both = self._first.get_future().then(hop)

    def wait_for_part(self) -> None:
        """Waits for the first hop, and lets go of the earlier sum where no other hop follows."""
        self._first.wait()
        if self._replica_group is None:
            self._add_earlier()

    def wait(self) -> Tensor:
        """Waits for both hops; returns (n,), the sum of this rank's part."""
        self._first.wait()
        if self._both is not None:
            self._both.wait().wait()
            return self._sum
        self._add_earlier()
        if self._replica_group is not None:
            dist.all_reduce(self._sum, group=self._replica_group)
        return self._sum

    def _add_earlier(self) -> None:
        if self._earlier is not None:
            self._sum.add_(self._earlier)
            self._earlier = None

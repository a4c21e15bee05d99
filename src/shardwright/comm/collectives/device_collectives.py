"""Collectives over nodes for tensors on accelerators, in chunked hops of NCCL.

With gloo, the caller waits for them; with NCCL, they run on its current stream.

::

    all-gather of 4 ranks on 2 nodes             across: one group of NCCL for each place on a node
    rank 0  0 ──▶ 0 2 ──▶ 0 2 1 3 ─▶ 0 1 2 3     inside: one group of NCCL for each node
    rank 1  1 ──▶ 1 3 ──▶ 0 2 1 3 ─▶ 0 1 2 3
             across   inside    reorder          ranks 2 and 3 do the same
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwright.collectives import Topology
from shardwright.collectives.choose import Choice, size_class
from shardwright.collectives.choose_on_devices import HIERARCHICAL, choose_on_devices
from shardwright.collectives.prices import DevicePrices
from shardwright.comm.collectives.device_lanes import Accelerator, Hop, Hops, spans
from shardwright.comm.collectives.ordered_thread import OrderedThread
from shardwright.comm.collectives.reduction import run_stock
from shardwright.comm.tensor_codec import flat
from shardwright.errors import UsageError

# Legend: N nodes, L ranks of each, C elements of a chunk.


class _HopsOverNodes:
    """Makes the hops of a group's collectives; all nodes have as many ranks.

    Tensors are flat. A chunk's hops begin one after the other has ended, on the group's lane.
    """

    def __init__(
        self, across: dist.ProcessGroup, inside: dist.ProcessGroup, shared: Callable[[Tensor], Tensor]
    ):
        self._across = across
        self._inside = inside
        self._shared = shared
        self._num_nodes, self._num_local = across.size(), inside.size()

    def all_gather(self, output: Tensor, data: Tensor, chunk: int) -> Hops:
        """Hops of an all-gather; the ranks of a node follow one another."""
        output_NLn = output.view(self._num_nodes, self._num_local, -1)
        columns = spans(data.numel(), chunk)
        parts: dict[int, Tensor] = {}

        def across(number: int) -> None:
            start, stop = columns[number]
            part_NC = self._shared(data.new_empty(self._num_nodes * (stop - start)))
            run_stock(self._across, "all_gather", data[start:stop], part_NC)
            parts[number] = part_NC

        def inside(number: int) -> None:
            part_NC = parts.pop(number)
            all_LNC = data.new_empty(self._num_local, self._num_nodes, part_NC.numel() // self._num_nodes)
            run_stock(self._inside, "all_gather", part_NC, all_LNC.view(-1))
            output_NLn[:, :, slice(*columns[number])] = all_LNC.transpose(0, 1)

        return Hops([Hop("across", across), Hop("inside", inside)], len(columns))

    def reduce_scatter(self, output: Tensor, data: Tensor, op: Any, chunk: int) -> Hops:
        """Hops of a reduce-scatter; the ranks of a node follow one another."""
        first, second = reductions_of_hops(op)
        data_NLn = data.view(self._num_nodes, self._num_local, -1)
        columns = spans(output.numel(), chunk)
        parts: dict[int, Tensor] = {}

        def inside(number: int) -> None:
            all_LNC = data_NLn[:, :, slice(*columns[number])].transpose(0, 1).contiguous()
            part_NC = self._shared(data.new_empty(all_LNC.numel() // self._num_local))
            run_stock(self._inside, "reduce_scatter", all_LNC.view(-1), part_NC, first)
            parts[number] = part_NC

        def across(number: int) -> None:
            part = output[slice(*columns[number])]
            run_stock(self._across, "reduce_scatter", parts.pop(number), part, second)

        return Hops([Hop("inside", inside), Hop("across", across)], len(columns))

    def all_reduce(self, data: Tensor, op: Any, chunk: int) -> Hops:
        """Hops of an all-reduce: each rank of a node takes a part of the sum to the other nodes."""
        first, second = reductions_of_hops(op)
        columns = spans(data.numel(), chunk)
        wholes: dict[int, Tensor] = {}
        parts: dict[int, Tensor] = {}

        def scatter(number: int) -> None:
            whole = data[slice(*columns[number])]
            if missing := -whole.numel() % self._num_local:
                whole = data.new_zeros(whole.numel() + missing)
                whole[:-missing] = data[slice(*columns[number])]
            part = self._shared(data.new_empty(whole.numel() // self._num_local))
            run_stock(self._inside, "reduce_scatter", whole, part, first)
            wholes[number], parts[number] = whole, part

        def across(number: int) -> None:
            run_stock(self._across, "all_reduce", parts[number], parts[number], second)

        def gather(number: int) -> None:
            whole, target = wholes.pop(number), data[slice(*columns[number])]
            run_stock(self._inside, "all_gather", parts.pop(number), whole)
            if whole.numel() != target.numel():
                target.copy_(whole[: target.numel()])

        return Hops([Hop("inside", scatter), Hop("across", across), Hop("inside", gather)], len(columns))

    def broadcast(self, data: Tensor, node: int, place: int, chunk: int) -> Hops:
        columns = spans(data.numel(), chunk)

        def across(number: int) -> None:
            part = data[slice(*columns[number])]
            run_stock(self._across, "broadcast", part, part, source=node)

        def inside(number: int) -> None:
            part = data[slice(*columns[number])]
            run_stock(self._inside, "broadcast", part, part, source=place)

        hops = [Hop("across", across)] if self._inside.rank() == place else []
        return Hops([*hops, Hop("inside", inside)], len(columns))


def reductions_of_hops(op: Any) -> tuple[Any, Any]:
    """The reductions of the first hop and of the second, which together make one.

    An average of averages is the average, as all nodes have as many ranks. A factor counts once.
    """
    return (op, dist.ReduceOp.SUM) if op == dist.ReduceOp.PREMUL_SUM else (op, op)


_SUM = dist.ReduceOp.SUM


class DeviceCollectives:
    """Collectives of one group on accelerators; all ranks ask for the same ones in the same order.

    What goes in hops needs further memory meanwhile: of an all-gather, a reduce-scatter or an all-reduce the
    whole divided by the ranks of a node, and two chunks.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        topology: Topology,
        prices: DevicePrices,
        accelerator: Accelerator,
        thread: OrderedThread,
        timeout_s: float,
    ):
        self.topology = topology
        self.prices = prices
        self._store = store
        self._rank = rank
        self._accelerator = accelerator
        self._timeout_s = timeout_s
        self._lanes = accelerator.make_lanes(thread)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self._choices: dict[tuple[str, int, int], Choice] = {}

    # ---- groups ----

    @property
    def everyone(self) -> dist.ProcessGroup:
        """The group of NCCL over all ranks, for what is not done here; made when it is first asked for."""
        return self._group("everyone", range(self.topology.num_ranks))

    @property
    def across(self) -> dist.ProcessGroup:
        """The group of the ranks that have this rank's place on their nodes; nodes must be of one size."""
        return self._group("across", [node[self._place] for node in self.topology.nodes])

    @property
    def inside(self) -> dist.ProcessGroup:
        """The group of the ranks on this rank's node."""
        return self._group("inside", self.topology.local(self._rank))

    def _group(self, name: str, ranks: Sequence[int]) -> dist.ProcessGroup:
        if name not in self._groups:
            # NCCL takes the first group that a process makes for that of all ranks, in its logs.
            if name != "everyone":
                _ = self.everyone
            self._groups[name] = self._accelerator.make_group(
                PrefixStore(f"{name}/{ranks[0]}", self._store),
                ranks.index(self._rank),
                len(ranks),
                timeout_s=self._timeout_s,
            )
        return self._groups[name]

    @property
    def _place(self) -> int:
        return self.topology.local(self._rank).index(self._rank)

    def shutdown(self) -> None:
        """Ends the groups that were made."""
        for group in self._groups.values():
            group.shutdown()

    def abort(self) -> None:
        """Ends the groups that were made, whatever they are doing."""
        for group in self._groups.values():
            group.abort()

    # ---- collectives, as `torch.distributed.ProcessGroup` has them ----

    def choice(self, collective: str, count: int, itemsize: int) -> Choice:
        """Chooses the way of a collective for one tensor of this size, with the reason.

        Several tensors at once, and averages of whole numbers, NCCL does over all ranks whatever their size.
        """
        key = (collective, size_class(count), itemsize)
        if key not in self._choices:
            self._choices[key] = choose_on_devices(
                collective, self.topology, count=key[1], itemsize=itemsize, prices=self.prices
            )
        return self._choices[key]

    def all_gather(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Gives every rank the inputs of all."""
        self._check("all_gather", outputs, inputs)
        chunk = self._chunk("all_gather", inputs)
        if chunk is None:
            if len(outputs) == 1:
                return self.everyone._allgather_base(outputs[0], inputs[0], opts)
            return self.everyone.allgather_into_tensor_coalesced(outputs, inputs, opts)
        hops = self._hops.all_gather(_line(outputs[0]), _line(inputs[0]), chunk)
        return self._lanes.run(hops, outputs, reads=inputs, waits=not opts.asyncOp)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Gives every rank its part of the sum of all inputs."""
        self._check("reduce_scatter", inputs, outputs)
        chunk = self._chunk("reduce_scatter", outputs, opts.reduceOp)
        if chunk is None:
            if len(outputs) == 1:
                return self.everyone._reduce_scatter_base(outputs[0], inputs[0], opts)
            return self.everyone.reduce_scatter_tensor_coalesced(outputs, inputs, opts)
        hops = self._hops.reduce_scatter(_line(outputs[0]), _line(inputs[0]), opts.reduceOp, chunk)
        return self._lanes.run(hops, outputs, reads=inputs, waits=not opts.asyncOp)

    def all_reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Gives every rank the sum of all inputs, in place."""
        chunk = self._chunk("all_reduce", tensors, opts.reduceOp)
        if chunk is None:
            if len(tensors) == 1:
                return self.everyone.allreduce(tensors, _options(dist.AllreduceOptions(), opts))
            opts = _options(dist.AllreduceCoalescedOptions(), opts)
            return self.everyone.allreduce_coalesced(tensors, opts)
        hops = self._hops.all_reduce(flat(tensors[0], "all_reduce"), opts.reduceOp, chunk)
        return self._lanes.run(hops, tensors, reads=[], waits=not opts.asyncOp)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Copies the data of rank ``opts.rootRank`` to every rank, in place."""
        chunk = self._chunk("broadcast", tensors)
        if chunk is None:
            return self.everyone.broadcast(tensors, opts)
        node = self.topology.node_of[opts.rootRank]
        place = self.topology.local(opts.rootRank).index(opts.rootRank)
        hops = self._hops.broadcast(flat(tensors[0], "broadcast"), node, place, chunk)
        return self._lanes.run(hops, tensors, reads=[], waits=not opts.asyncOp)

    def barrier(self, opts: Any) -> dist.Work:
        """Waits for all ranks, behind all collectives that were asked for before."""
        self._lanes.join()
        return self.everyone.barrier(opts)

    @cached_property
    def _hops(self) -> _HopsOverNodes:
        return _HopsOverNodes(self.across, self.inside, self._lanes.shared)

    def _chunk(self, collective: str, pieces: list[Tensor], op: Any = _SUM) -> int | None:
        """Elements of a piece that go at once, or 0 for all of them; None where NCCL is to do it."""
        if len(pieces) > 1 or not pieces[0].numel() or pieces[0].layout is not torch.strided:
            return None
        if op == dist.ReduceOp.AVG and not pieces[0].is_floating_point():
            return None  # each hop would round
        # NCCL has no complex numbers; torch.distributed passes parts of them alone, but for broadcasts.
        elements = torch.view_as_real(pieces[0]) if pieces[0].is_complex() else pieces[0]
        candidate = self.choice(collective, elements.numel(), elements.element_size()).candidate
        return candidate.chunk if candidate.name == HIERARCHICAL else None

    def _check(self, collective: str, wholes: list[Tensor], pieces: list[Tensor]) -> None:
        """Refuses tensors that do not fit."""
        num_ranks = self.topology.num_ranks
        for whole, piece in zip(wholes, pieces, strict=True):
            if whole.numel() != num_ranks * piece.numel() or whole.dtype != piece.dtype:
                raise UsageError(
                    f"{collective} over {num_ranks} ranks takes pieces of one size and type that make up the "
                    f"whole, but the whole has {whole.numel()} elements of {whole.dtype} and the piece "
                    f"{piece.numel()} of {piece.dtype}. Make the whole {num_ranks} times as large."
                )
            if not whole.is_contiguous() or not piece.is_contiguous():
                raise UsageError(
                    f"{collective} takes contiguous tensors, but these have the strides {whole.stride()} and "
                    f"{piece.stride()}. Pass tensor.contiguous()."
                )


def _options(fresh: Any, given: Any) -> Any:
    """Options of one type as those of another: an all-reduce's, and those of several at once."""
    fresh.reduceOp, fresh.timeout, fresh.asyncOp = given.reduceOp, given.timeout, given.asyncOp
    return fresh


def _line(tensor: Tensor) -> Tensor:
    """The elements of a contiguous tensor one after the other; complex ones as pairs."""
    plain = tensor.detach()
    return (torch.view_as_real(plain) if plain.is_complex() else plain).view(-1)

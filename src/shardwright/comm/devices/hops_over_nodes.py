"""Collectives in chunked hops: across nodes, and inside them."""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.devices.hops import Hop, Hops, spans
from shardwright.comm.joining import group_collectives

__all__ = ["HopsOverNodes", "reductions_of_hops"]

# Legend: N nodes, L ranks of each, C elements of a chunk.


class HopsOverNodes:
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
            group_collectives.all_gather(self._across, part_NC, data[start:stop])
            parts[number] = part_NC

        def inside(number: int) -> None:
            part_NC = parts.pop(number)
            all_LNC = data.new_empty(self._num_local, self._num_nodes, part_NC.numel() // self._num_nodes)
            group_collectives.all_gather(self._inside, all_LNC.view(-1), part_NC)
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
            group_collectives.reduce_scatter(self._inside, part_NC, all_LNC.view(-1), first)
            parts[number] = part_NC

        def across(number: int) -> None:
            group_collectives.reduce_scatter(
                self._across, output[slice(*columns[number])], parts.pop(number), second
            )

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
            group_collectives.reduce_scatter(self._inside, part, whole, first)
            wholes[number], parts[number] = whole, part

        def across(number: int) -> None:
            group_collectives.all_reduce(self._across, parts[number], second)

        def gather(number: int) -> None:
            whole, target = wholes.pop(number), data[slice(*columns[number])]
            group_collectives.all_gather(self._inside, whole, parts.pop(number))
            if whole.numel() != target.numel():
                target.copy_(whole[: target.numel()])

        return Hops([Hop("inside", scatter), Hop("across", across), Hop("inside", gather)], len(columns))

    def broadcast(self, data: Tensor, node: int, place: int, chunk: int) -> Hops:
        columns = spans(data.numel(), chunk)

        def across(number: int) -> None:
            group_collectives.broadcast(self._across, data[slice(*columns[number])], node)

        def inside(number: int) -> None:
            group_collectives.broadcast(self._inside, data[slice(*columns[number])], place)

        hops = [Hop("across", across)] if self._inside.rank() == place else []
        return Hops([*hops, Hop("inside", inside)], len(columns))


def reductions_of_hops(op: Any) -> tuple[Any, Any]:
    """The reductions of the first hop and of the second, which together make one.

    An average of averages is the average, as all nodes have as many ranks. A factor counts once.
    """
    return (op, dist.ReduceOp.SUM) if op == dist.ReduceOp.PREMUL_SUM else (op, op)

"""All-gathers several tensors into memory shared by the ranks of a node."""

from typing import Protocol

import torch
from torch import Tensor

from shardwright.collectives import Topology, gather_to_nodes
from shardwright.collectives.routine import Routine
from shardwright.collectives.steps import Row
from shardwright.comm.collectives.block_quantiser import BlockQuantiser

__all__ = ["NodeGather"]


class NodeGroup(Protocol):
    """The group whose thread runs the gather: see `Communicator`."""

    @property
    def rank(self) -> int:
        """Of this process in the group."""

    @property
    def topology(self) -> Topology:
        """The ranks that share a node."""

    def share_memory(self, num_bytes: int) -> Tensor:
        """Memory that the ranks of the node share."""

    def run_routine(
        self, name: str, routine: Routine, data: Tensor, result: Tensor, *, shared: Tensor | None = None
    ) -> None:
        """Runs the steps of a collective."""


class NodeGather:
    """Gathers, on the thread of a group; see `Communicator.gather_to_nodes`."""

    def __init__(self, group: NodeGroup):
        self._group = group
        self._routines: dict[tuple[int, ...], Routine] = {}
        self._packed = torch.empty(0, dtype=torch.uint8)

    def __call__(self, memory: Tensor, data: Tensor, pieces: tuple[int, ...]) -> None:
        """Gathers elements as they are."""
        group = self._group
        if pieces not in self._routines:
            steps = gather_to_nodes(group.topology, group.rank, pieces=pieces)
            self._routines[pieces] = Routine.of(steps)
        group.run_routine("gather_to_nodes", self._routines[pieces], data, memory, shared=memory)

    def packed(
        self, memory: Tensor, data: Tensor, pieces: tuple[int, ...], quantiser: BlockQuantiser
    ) -> None:
        """Gathers packed elements; the ranks of the node share the unpacking."""
        group = self._group
        num_ranks, here = group.topology.num_ranks, group.topology.local(group.rank)
        count = data.numel() - pieces[-1]
        packed = torch.cat([quantiser.pack(data[:count]), data[count:].view(torch.uint8)])
        size = packed.numel()
        if self._packed.numel() < num_ranks * size:
            self._packed = group.share_memory(num_ranks * size)
        self(self._packed[: num_ranks * size], packed, (size,))
        tensors = torch.split(memory, [num_ranks * piece for piece in pieces])
        targets = [tensor.view(num_ranks, -1) for tensor in tensors]
        numbers = torch.empty_like(data)
        for rank in range(here.index(group.rank), num_ranks, len(here)):
            theirs = self._packed[rank * size : (rank + 1) * size]
            quantiser.unpack(theirs[: quantiser.num_bytes(count)], numbers[:count])
            numbers[count:].view(torch.uint8).copy_(theirs[quantiser.num_bytes(count) :])
            for target, piece in zip(targets, torch.split(numbers, list(pieces)), strict=True):
                target[rank] = piece
        row = Row(group.rank, here)
        row.tell("unpacked", 0)
        row.hear("unpacked", 0)
        group.run_routine("unpacked", Routine.of(row.steps), data, memory)

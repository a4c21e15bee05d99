"""All-gathers several tensors into memory shared by the ranks of a node."""

from typing import Protocol

from torch import Tensor

from shardwright.collectives import Topology, gather_to_nodes
from shardwright.collectives.routine import Routine

__all__ = ["NodeGather"]


class NodeGroup(Protocol):
    """The group whose thread runs the gather: see `Communicator`."""

    @property
    def rank(self) -> int:
        """Of this process in the group."""

    @property
    def topology(self) -> Topology:
        """The ranks that share a node."""

    def run_routine(
        self, name: str, routine: Routine, data: Tensor, result: Tensor, *, shared: Tensor | None = None
    ) -> None:
        """Runs the steps of a collective."""


class NodeGather:
    """Gathers, on the thread of a group; see `Communicator.gather_to_nodes`."""

    def __init__(self, group: NodeGroup):
        self._group = group
        self._routines: dict[tuple[int, ...], Routine] = {}

    def __call__(self, memory: Tensor, data: Tensor, pieces: tuple[int, ...]) -> None:
        """Gathers elements as they are."""
        group = self._group
        if pieces not in self._routines:
            steps = gather_to_nodes(group.topology, group.rank, pieces=pieces)
            self._routines[pieces] = Routine.of(steps)
        group.run_routine("gather_to_nodes", self._routines[pieces], data, memory, shared=memory)

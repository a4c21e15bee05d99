"""The topology of a group: which ranks share a host."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from shardwright.errors import UsageError

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """The ranks of a group, node by node.

    Ranks are those of the group: 0 to `num_ranks` - 1. A node is a set of ranks that share memory; there may
    be one rank alone on it, and nodes need not be of one size.

    Attributes:
        nodes: ascending ranks of each node; the nodes are in the order of their first ranks.

    >>> Topology.from_hosts(["a", "a", "b", "b", "b"])
    Topology(nodes=((0, 1), (2, 3, 4)))
    """

    nodes: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        nodes = tuple(sorted(tuple(sorted(node)) for node in self.nodes if node))
        object.__setattr__(self, "nodes", nodes)
        found = sorted(rank for node in nodes for rank in node)
        if found != list(range(len(found))):
            raise UsageError(
                f"the nodes {nodes} hold the ranks {found}, but a group of {len(found)} has each of the "
                f"ranks 0 to {len(found) - 1} once."
            )

    @classmethod
    def from_hosts(cls, hosts: Sequence[str]) -> "Topology":
        """The topology of ranks that each report their host."""
        nodes: dict[str, list[int]] = {}
        for rank, host in enumerate(hosts):
            nodes.setdefault(host, []).append(rank)
        return cls(tuple(map(tuple, nodes.values())))

    @property
    def num_ranks(self) -> int:
        """Ranks of the group."""
        return len(self.node_of)

    @cached_property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        by_rank = {rank: number for number, node in enumerate(self.nodes) for rank in node}
        return tuple(by_rank[rank] for rank in range(len(by_rank)))

    def flat(self) -> "Topology":
        """The same ranks without shared memory."""
        return Topology(tuple((rank,) for rank in range(self.num_ranks)))

    def local(self, rank: int) -> tuple[int, ...]:
        """The ranks on the node of one of them, itself included."""
        return self.nodes[self.node_of[rank]]

    def __str__(self) -> str:
        """How many ranks there are on how many nodes.

        >>> print(Topology.from_hosts("aabb"), "|", Topology.from_hosts("aab"), "|", Topology.from_hosts("a"))
        2 nodes x 2 ranks | 2 nodes of 2, 1 ranks | 1 node x 1 rank
        """
        sizes = [len(node) for node in self.nodes]
        noun = "node" if len(sizes) == 1 else "nodes"
        if len(set(sizes)) == 1:
            return f"{len(sizes)} {noun} x {sizes[0]} {'rank' if sizes[0] == 1 else 'ranks'}"
        return f"{len(sizes)} {noun} of {', '.join(map(str, sizes))} ranks"

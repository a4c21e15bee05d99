"""One rank's view of a collective: its node, and the handlers of each piece between nodes."""

from collections.abc import Callable, Iterator

from shardwright.collectives.parts import lane_of
from shardwright.collectives.topology import Topology

__all__ = ["NodeView"]


class NodeView:
    """The nodes, and the pieces of all ranks, from one rank's point of view.

    What a node has for another one is a table: one row a rank, `width` elements each. On either side, the
    ranks share the elements of the table evenly: those that one of them handles are its lane.

    Attributes:
        peers: the other ranks of its node.
        others: numbers of the other nodes, beginning behind its own one, so that not all nodes
            send to the same one first.
    """

    def __init__(self, topology: Topology, rank: int, *, width: int, size: Callable[[int, int], int]):
        self.topology = topology
        self.rank = rank
        self.width = width
        self.size = size
        self.node = topology.node_of[rank]
        self.here = topology.nodes[self.node]
        self.peers = tuple(peer for peer in self.here if peer != rank)
        num_nodes = len(topology.nodes)
        self.others = tuple((self.node + step) % num_nodes for step in range(1, num_nodes))

    def ranks_of(self, node: int) -> tuple[int, ...]:
        return self.topology.nodes[node]

    def lane(self, handler: int, node: int, chunk: int) -> Iterator[tuple[int, int, int]]:
        """Of a table with a row for each rank of `node`, what `handler` handles: (rank, start, stop)."""
        handlers = self.topology.local(handler)
        owners = self.topology.nodes[node]
        for row, start, stop in lane_of(len(owners), self.width, handlers.index(handler), len(handlers)):
            size = self.size(chunk, owners[row])
            if start < size:
                yield owners[row], start, min(stop, size)

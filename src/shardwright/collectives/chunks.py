"""How one chunk goes from rank to rank: broadcast, all-gathered, reduce-scattered.

A broadcast::

    node 0 (source)        node 1                 node 2
    rank 0 ─ half ───────▶ rank 2 ─ half ───────▶ rank 4      (1) all ranks of a node send and receive a part
    rank 1 ─ half ───────▶ rank 3 ─ half ───────▶ rank 5
       │                      │                      │
       ▼                      ▼                      ▼
    all copy it out of the memory of their node               (2)

Each node receives a chunk once and sends it once, while the next one arrives. An all-gather::

    node 0                              node 1
    rank 0 ── piece 0 ────────────────▶ rank 2      (1) between nodes, all ranks of a node at the same time
    rank 1 ── piece 1 ────────────────▶ rank 3
       │ shared memory of node 0           │
       ▼                                   ▼
    0 1 2 3 copied out by each rank     0 1 2 3     (2) inside of the node; what came is where it belongs

Each byte enters a node once: (p - k) / p of the whole for p ranks, k of them on the node. No algorithm sends
fewer.

A reduce-scatter, its mirror::

    node 0                                 node 1
    rank 0 ┐ shared memory of node 0       rank 2 ┐      (1) inside of the node: each rank sums a part of what
    rank 1 ┘                               rank 3 ┘          the node has for others, and its own piece
       │                                      │
       └── sum for rank 2 ────────────────▶ rank 2       (2) between nodes, all ranks at the same time

Sums are always taken in the same order: first over the ranks of a node, ascending, then over the nodes.
"""

from collections.abc import Callable, Iterator

from shardwright.collectives.steps import Arrived, Left, Memory, Row, Span, Topology

_ALIGNMENT = 16
"""Parts begin at multiples of so many elements: copies of aligned memory are faster."""


def part_of(count: int, number: int, num_parts: int) -> tuple[int, int]:
    """One of several parts of `count` elements, nearly equal ones: its start and stop.

    >>> [part_of(100, number, 3) for number in range(3)], [part_of(2, number, 3) for number in range(3)]
    ([(0, 48), (48, 80), (80, 100)], [(0, 2), (2, 2), (2, 2)])
    """
    return _boundary(count, number, num_parts), _boundary(count, number + 1, num_parts)


def _boundary(count: int, number: int, num_parts: int) -> int:
    blocks = -(-count // _ALIGNMENT)
    each, more = divmod(blocks, num_parts)
    return min(count, (number * each + min(number, more)) * _ALIGNMENT)


def chunks_of(count: int, size: int) -> Iterator[tuple[int, int]]:
    """Start and stop of chunks of `count` elements, nearly equal ones of at most `size`.

    >>> list(chunks_of(100, 64)), list(chunks_of(0, 64))
    ([(0, 64), (64, 100)], [])
    """
    num_chunks = -(-count // size)
    for number in range(num_chunks):
        start, stop = part_of(count, number, num_chunks)
        if stop > start:
            yield start, stop


def lane_of(num_rows: int, width: int, number: int, num_lanes: int) -> Iterator[tuple[int, int, int]]:
    """What one of several ranks handles of rows that they share evenly: (row, start, stop).

    Where there are as many rows as ranks, each has one row.

    >>> [list(lane_of(2, 32, number, 2)) for number in range(2)]
    [[(0, 0, 32)], [(1, 0, 32)]]
    >>> [list(lane_of(3, 32, number, 2)) for number in range(2)]
    [[(0, 0, 32), (1, 0, 16)], [(1, 16, 32), (2, 0, 32)]]
    """
    start = _lane_boundary(num_rows, width, number, num_lanes)
    stop = _lane_boundary(num_rows, width, number + 1, num_lanes)
    while start < stop:
        row, inside = divmod(start, width)
        end = min(width, inside + stop - start)
        yield row, inside, end
        start += end - inside


def _lane_boundary(num_rows: int, width: int, number: int, num_lanes: int) -> int:
    row, rest = divmod(number * num_rows, num_lanes)
    return row * width + _boundary(width, rest, num_lanes)


class NodeView:
    """The nodes, and the pieces of all ranks, from one rank's point of view.

    What a node has for another one is a table: one row a rank, `width` elements each. On either side, the
    ranks share the elements of the table evenly: those that one of them handles are its lane.

    Attributes:
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


class Forward:
    def __init__(self, topology: Topology, row: Row, *, source: int, width: int, depth: int):
        self._topology = topology
        self._row = row
        self._source = source
        self._width = width
        self._depth = depth
        self._here = topology.local(row.rank)
        first, num_nodes = topology.node_of[source], len(topology.nodes)
        chain = [topology.nodes[(first + step) % num_nodes] for step in range(num_nodes)]
        position = chain.index(self._here)
        self._before = chain[position - 1] if position else ()
        self._behind = chain[position + 1] if position + 1 < num_nodes else ()
        self._arrivals: dict[int, list[Arrived]] = {}
        self._departures: dict[int, list[Left]] = {}

    def begin(self, chunk: int, data: Span) -> None:
        """Says where this rank's part of a chunk goes; the source shows the node what it has."""
        row = self._row
        self._finish(chunk - self._depth)
        if row.rank == self._source and len(self._here) > 1:
            row.copy(data, self._staged(chunk, data))
        if row.rank == self._source or not self._before:
            row.tell("forward: here", chunk)
            return
        staged = self._staged(chunk, data)
        self._arrivals[chunk] = [
            row.receive(peer, Span(staged.memory, staged.start + start, staged.start + stop))
            for peer, start, stop in self._parts(self._before, self._here, data.num_elements)
        ]

    def end(self, chunk: int, data: Span) -> None:
        """Passes a chunk on, and takes it."""
        row = self._row
        if self._before:
            row.wait(self._arrivals.pop(chunk))
            row.tell("forward: here", chunk)
            row.hear("forward: here", chunk)
        else:
            row.hear("forward: here", chunk, [self._source])
        staged = self._staged(chunk, data)
        self._departures[chunk] = [
            row.send(peer, Span(staged.memory, staged.start + start, staged.start + stop))
            for peer, start, stop in self._parts(self._behind, self._here, data.num_elements)
        ]
        if row.rank != self._source:
            row.copy(staged, data)

    def finish(self) -> None:
        """Waits until all has left that was sent."""
        for chunk in sorted(self._departures):
            self._finish(chunk, reuse=False)

    def _finish(self, chunk: int, *, reuse: bool = True) -> None:
        """Waits until a chunk has left this rank, and until nobody of the node reads it any more."""
        if chunk in self._departures:
            self._row.wait(self._departures.pop(chunk))
            self._row.tell("forward: read", chunk)
            if reuse:
                self._row.hear("forward: read", chunk)

    def _staged(self, chunk: int, data: Span) -> Span:
        if len(self._here) == 1:
            return data
        base = chunk % self._depth * self._width
        return Span(Memory.SHARED, base, base + data.num_elements)

    def _parts(
        self, there: tuple[int, ...], here: tuple[int, ...], size: int
    ) -> Iterator[tuple[int, int, int]]:
        """What this rank sends to, or gets from, each rank of a node: (rank, start, stop)."""
        for _, start, stop in lane_of(1, size, here.index(self._row.rank), len(here)):
            for number, peer in enumerate(there):
                for _, begin, end in lane_of(1, size, number, len(there)):
                    if max(start, begin) < min(stop, end):
                        yield peer, max(start, begin), min(stop, end)


SpanOf = Callable[[int, int, int], Span]
"""Where elements `start` to `stop` of the piece of a rank are: called with the rank, start and stop."""


class Gather:
    def __init__(
        self,
        view: NodeView,
        row: Row,
        *,
        shared: Callable[[int, int, int, int], Span],
    ):
        self._view = view
        self._row = row
        self._shared = shared
        self._arrivals: dict[int, list[Arrived]] = {}

    def begin(self, chunk: int, own: Span, output: SpanOf) -> None:
        """Sends this rank's piece, and says where those of others go.

        Nobody may read this part of the shared memory any more: see `reuse`.
        """
        view, row = self._view, self._row
        if view.peers:
            row.copy(own, self._shared(chunk, view.rank, 0, own.num_elements))
            row.tell("gather: staged", chunk)
        for node in view.others:
            for peer in view.ranks_of(node):
                for owner, start, stop in view.lane(peer, view.node, chunk):
                    if owner == view.rank:
                        row.send(peer, Span(own.memory, own.start + start, own.start + stop))
        self._arrivals[chunk] = [
            row.receive(
                owner,
                self._shared(chunk, owner, start, stop) if view.peers else output(owner, start, stop),
            )
            for node in reversed(view.others)
            for owner, start, stop in view.lane(view.rank, node, chunk)
        ]
        row.copy(own, output(view.rank, 0, own.num_elements))

    def end(self, chunk: int, output: SpanOf) -> None:
        """Waits for the pieces of others and puts them where they are to be."""
        view, row = self._view, self._row
        for peer in view.peers:
            row.hear("gather: staged", chunk, [peer])
            self._copy_out(chunk, peer, output)
        row.wait(self._arrivals.pop(chunk))
        if view.peers and view.others:
            row.tell("gather: came", chunk)
            row.hear("gather: came", chunk)
            for node in view.others:
                for owner in view.ranks_of(node):
                    self._copy_out(chunk, owner, output)
        row.tell("gather: read", chunk)

    def reuse(self, chunk: int) -> None:
        """Waits until nobody of the node reads a chunk any more."""
        if chunk >= 0:
            self._row.hear("gather: read", chunk)

    def _copy_out(self, chunk: int, owner: int, output: SpanOf) -> None:
        size = self._view.size(chunk, owner)
        self._row.copy(self._shared(chunk, owner, 0, size), output(owner, 0, size))


class Scatter:
    def __init__(
        self,
        view: NodeView,
        row: Row,
        *,
        depth: int,
        shared: Callable[[int, int, int, int, int], Span],
    ):
        self._view = view
        self._row = row
        self._depth = depth
        self._shared = shared
        self._arrivals: dict[int, list[Arrived]] = {}
        self._departures: dict[int, list[Left]] = {}

    def begin(self, chunk: int, pieces: SpanOf) -> None:
        """Sends this rank's sums for other nodes, and says where their sums go.

        Nobody may read this part of the shared memory any more: see `reuse`.
        """
        view, row = self._view, self._row
        for handler in view.peers:
            for owner, start, stop in self._handled_by(handler, chunk):
                row.copy(pieces(owner, start, stop), self._shared(chunk, view.rank, owner, start, stop))
        row.tell("scatter: staged", chunk)
        row.wait(self._departures.pop(chunk - self._depth, []))
        self._arrivals[chunk] = [
            row.receive(handler, self._partial(chunk, node, start, stop))
            for node in reversed(view.others)
            for handler in view.ranks_of(node)
            for owner, start, stop in view.lane(handler, view.node, chunk)
            if owner == view.rank
        ]
        if view.others:
            row.hear("scatter: staged", chunk)
            self._departures[chunk] = [
                row.send(owner, self._sum_here(chunk, owner, start, stop, pieces))
                for node in view.others
                for owner, start, stop in view.lane(view.rank, node, chunk)
            ]

    def end(self, chunk: int, pieces: SpanOf, output: Span) -> None:
        """Sums up this rank's piece."""
        view, row = self._view, self._row
        size = output.num_elements
        if not view.others:
            row.hear("scatter: staged", chunk)
            row.combine(self._contributions(chunk, view.rank, 0, size, pieces), output)
            row.tell("scatter: read", chunk)
            return
        own = self._sum_here(chunk, view.rank, 0, size, pieces)
        row.tell("scatter: read", chunk)
        row.wait(self._arrivals.pop(chunk))
        row.combine(
            [
                own if node == view.node else self._partial(chunk, node, 0, size)
                for node in range(len(view.topology.nodes))
            ],
            output,
        )

    def finish(self) -> None:
        """Waits until all has left that was sent."""
        for departures in self._departures.values():
            self._row.wait(departures)

    def reuse(self, chunk: int) -> None:
        """Waits until nobody of the node reads a chunk any more."""
        if chunk >= 0:
            self._row.hear("scatter: read", chunk)

    def _handled_by(self, handler: int, chunk: int) -> Iterator[tuple[int, int, int]]:
        """What a rank of the node sums up: its own piece, and its lanes of what other nodes get."""
        yield handler, 0, self._view.size(chunk, handler)
        for node in self._view.others:
            yield from self._view.lane(handler, node, chunk)

    def _sum_here(self, chunk: int, owner: int, start: int, stop: int, pieces: SpanOf) -> Span:
        """Sums up what the ranks of the node have for a rank, and says where the sum is."""
        sources = self._contributions(chunk, owner, start, stop, pieces)
        if len(sources) == 1:
            return sources[0]
        total = self._scratch(chunk, owner, start, stop)
        self._row.combine(sources, total)
        return total

    def _contributions(self, chunk: int, owner: int, start: int, stop: int, pieces: SpanOf) -> list[Span]:
        return [
            pieces(owner, start, stop)
            if rank == self._view.rank
            else self._shared(chunk, rank, owner, start, stop)
            for rank in self._view.here
        ]

    def _partial(self, chunk: int, node: int, start: int, stop: int) -> Span:
        """Where the sum goes that comes from another node for this rank."""
        return self._scratch(chunk, self._view.topology.num_ranks + node, start, stop)

    def _scratch(self, chunk: int, place: int, start: int, stop: int) -> Span:
        places = self._view.topology.num_ranks + len(self._view.topology.nodes)
        base = (chunk % self._depth * places + place) * self._view.width
        return Span(Memory.SCRATCH, base + start, base + stop)

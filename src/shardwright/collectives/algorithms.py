"""The algorithms of the collectives, as rows of steps.

Long collectives run in chunks, so that links between and inside nodes are busy at once::

    between nodes   | chunk 0 | chunk 1 | chunk 2 |
    inside                    | chunk 0 | chunk 1 | chunk 2 |

In a topology with one rank per node, all data crosses links between nodes: that is the flat form.

`gather_to_nodes` gathers several tensors into memory shared by the ranks of a node::

    node 0                                      node 1
    rank 0 ── pieces 0 ──────────────────────▶  memory of node 1
    rank 1 ── pieces 1 ──────────────────────▶  0 1 2 3 of the first tensor, 0 1 2 3 of the second, ...

Each byte enters a node once, and stays where it arrives: nothing is copied inside a node except each rank's
own pieces.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from shardwright.collectives.chunks import Forward, Gather, NodeView, Scatter, chunks_of
from shardwright.collectives.steps import Memory, Row, Span, Step, Topology

_DEPTH = 2
"""Chunks that are under way at once."""


def all_gather(topology: Topology, rank: int, *, count: int, chunk: int) -> list[Step]:
    """Gives every rank the inputs of all."""
    chunks = list(chunks_of(count, chunk))
    width = max((stop - start for start, stop in chunks), default=0)

    def shared(number: int, owner: int, start: int, stop: int) -> Span:
        return _at(Memory.SHARED, (number % _DEPTH * topology.num_ranks + owner) * width, start, stop)

    def output(number: int, owner: int, start: int, stop: int) -> Span:
        return _at(Memory.OUTPUT, owner * count + chunks[number][0], start, stop)

    view = NodeView(topology, rank, width=width, size=lambda number, owner: _length(chunks[number]))
    row = Row(rank, view.here)
    phase = Gather(view, row, shared=shared)
    for number in range(len(chunks) + 1):
        if number < len(chunks):
            phase.reuse(number - _DEPTH)
            phase.begin(number, Span(Memory.INPUT, *chunks[number]), partial(output, number))
        if number:
            phase.end(number - 1, partial(output, number - 1))
    return row.steps


def reduce_scatter(topology: Topology, rank: int, *, count: int, chunk: int) -> list[Step]:
    """Gives every rank its piece of the sum of all inputs."""
    chunks = list(chunks_of(count, chunk))
    width = max((stop - start for start, stop in chunks), default=0)
    view = NodeView(topology, rank, width=width, size=lambda number, owner: _length(chunks[number]))

    def shared(number: int, giver: int, owner: int, start: int, stop: int) -> Span:
        place = number % _DEPTH * len(view.here) + view.here.index(giver)
        return _at(Memory.SHARED, (place * topology.num_ranks + owner) * width, start, stop)

    def pieces(number: int, owner: int, start: int, stop: int) -> Span:
        return _at(Memory.INPUT, owner * count + chunks[number][0], start, stop)

    row = Row(rank, view.here)
    phase = Scatter(view, row, depth=_DEPTH, shared=shared)
    for number in range(len(chunks) + 1):
        if number < len(chunks):
            phase.reuse(number - _DEPTH)
            phase.begin(number, partial(pieces, number))
        if number:
            done = number - 1
            phase.end(done, partial(pieces, done), Span(Memory.OUTPUT, *chunks[done]))
    phase.finish()
    return row.steps


def all_reduce(topology: Topology, rank: int, *, count: int, chunk: int) -> list[Step]:
    """Gives every rank the sum of all inputs: a reduce-scatter and an all-gather, chunk by chunk."""
    num_ranks = topology.num_ranks
    chunks = list(chunks_of(count, chunk * num_ranks))
    width = max((-(-(stop - start) // num_ranks) for start, stop in chunks), default=0)
    width = -(-width // 16) * 16

    def size(number: int, owner: int) -> int:
        return min(width, max(0, _length(chunks[number]) - owner * width))

    view = NodeView(topology, rank, width=width, size=size)
    slot = (len(view.here) + 1) * num_ranks * width

    def to_sum(number: int, giver: int, owner: int, start: int, stop: int) -> Span:
        place = (view.here.index(giver) * num_ranks + owner) * width
        return _at(Memory.SHARED, number % _DEPTH * slot + place, start, stop)

    def summed(number: int, owner: int, start: int, stop: int) -> Span:
        place = (len(view.here) * num_ranks + owner) * width
        return _at(Memory.SHARED, number % _DEPTH * slot + place, start, stop)

    def pieces(memory: Memory, number: int, owner: int, start: int, stop: int) -> Span:
        return _at(memory, chunks[number][0] + owner * width, start, stop)

    row = Row(rank, view.here)
    scatter = Scatter(view, row, depth=_DEPTH, shared=to_sum)
    gather = Gather(view, row, shared=summed)
    for number in range(len(chunks) + 2):
        if number < len(chunks):
            scatter.reuse(number - _DEPTH)
            scatter.begin(number, partial(pieces, Memory.INPUT, number))
        if 0 <= number - 1 < len(chunks):
            now = number - 1
            own = pieces(Memory.OUTPUT, now, rank, 0, size(now, rank))
            scatter.end(now, partial(pieces, Memory.INPUT, now), own)
            gather.reuse(now - _DEPTH)
            gather.begin(now, own, partial(pieces, Memory.OUTPUT, now))
        if number >= 2:
            gather.end(number - 2, partial(pieces, Memory.OUTPUT, number - 2))
    scatter.finish()
    return row.steps


def all_reduce_at_once(topology: Topology, rank: int, *, count: int) -> list[Step]:
    """The sum of all inputs for the ranks of one node, where each takes all inputs and sums them itself."""
    row = Row(rank, topology.local(rank))
    own, output = Span(Memory.INPUT, 0, count), Span(Memory.OUTPUT, 0, count)
    staged = [_at(Memory.SHARED, peer * count, 0, count) for peer in topology.local(rank)]
    row.copy(own, staged[rank])
    row.tell("at once: staged", 0)
    row.hear("at once: staged", 0)
    row.combine([own if peer == rank else staged[peer] for peer in topology.local(rank)], output)
    row.tell("at once: read", 0)
    return row.steps


def broadcast(topology: Topology, rank: int, *, count: int, chunk: int, source: int) -> list[Step]:
    """Gives every rank what one of them has."""
    chunks = list(chunks_of(count, chunk))
    width = max((stop - start for start, stop in chunks), default=0)
    row = Row(rank, topology.local(rank))
    phase = Forward(topology, row, source=source, width=width, depth=_DEPTH)
    memory = Memory.INPUT if rank == source else Memory.OUTPUT
    for number in range(len(chunks) + 1):
        if number < len(chunks):
            phase.begin(number, Span(memory, *chunks[number]))
        if number:
            phase.end(number - 1, Span(memory, *chunks[number - 1]))
    phase.finish()
    return row.steps


def _at(memory: Memory, base: int, start: int, stop: int) -> Span:
    return Span(memory, base + start, base + stop)


def _length(chunk: tuple[int, int]) -> int:
    return chunk[1] - chunk[0]


def gather_to_nodes(topology: Topology, rank: int, *, pieces: Sequence[int]) -> tuple[Step, ...]:
    view = NodeView(topology, rank, width=max(pieces, default=0), size=lambda tensor, _: pieces[tensor])
    row = Row(rank, view.here)
    starts = list(accumulate(pieces, initial=0))
    arrivals = []

    def place(tensor: int, owner: int, start: int, stop: int) -> Span:
        first = starts[tensor] * topology.num_ranks + owner * pieces[tensor]
        return Span(Memory.SHARED, first + start, first + stop)

    for tensor, size in enumerate(pieces):
        for node in view.others:
            for peer in view.ranks_of(node):
                for owner, start, stop in view.lane(peer, view.node, tensor):
                    if owner == rank:
                        row.send(peer, Span(Memory.INPUT, starts[tensor] + start, starts[tensor] + stop))
        arrivals += [
            row.receive(owner, place(tensor, owner, start, stop))
            for node in reversed(view.others)
            for owner, start, stop in view.lane(rank, node, tensor)
        ]
        row.copy(Span(Memory.INPUT, starts[tensor], starts[tensor] + size), place(tensor, rank, 0, size))
    row.wait(arrivals)
    row.tell("gather to nodes: there", 0)
    row.hear("gather to nodes: there", 0)
    return tuple(row.steps)

"""Every rank gets what it should, whatever the nodes, without a race."""

from itertools import accumulate

from collectives.played import replay
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.collectives import (
    Memory,
    Topology,
    all_gather,
    all_reduce,
    all_reduce_at_once,
    broadcast,
    gather_to_nodes,
    reduce_scatter,
)

topologies = st.lists(st.integers(0, 3), min_size=1, max_size=6).map(Topology.from_hosts)
counts = st.one_of(st.integers(0, 40), st.sampled_from([48, 64, 100, 160]))
chunks = st.sampled_from([16, 32, 64, 1000])


def ordered(topology: Topology, index: int) -> tuple[object, ...]:
    """What a sum over all ranks is the sum of, in the order that is promised."""
    return tuple((rank, index) for node in topology.nodes for rank in node)


def labelled(num_ranks: int, count: int) -> list[list[tuple[object, ...]]]:
    return [[((rank, index),) for index in range(count)] for rank in range(num_ranks)]


@settings(deadline=None)
@given(topology=topologies, count=counts, chunk=chunks)
def test_all_gather(topology, count, chunk):
    num_ranks = topology.num_ranks
    rows = [all_gather(topology, rank, count=count, chunk=chunk) for rank in range(num_ranks)]
    played = replay(topology, rows, labelled(num_ranks, count))
    whole = [((rank, index),) for rank in range(num_ranks) for index in range(count)]
    for rank in range(num_ranks):
        assert played.elements[Memory.OUTPUT, rank] == dict(enumerate(whole))
    # Each node gives the others what it has once, so that each gets M (p - k) / p.
    for node in topology.nodes:
        elsewhere = len(topology.nodes) - 1
        assert sum(played.between_nodes[rank] for rank in node) == len(node) * count * elsewhere


@settings(deadline=None)
@given(topology=topologies, count=counts, chunk=chunks)
def test_reduce_scatter(topology, count, chunk):
    num_ranks = topology.num_ranks
    rows = [reduce_scatter(topology, rank, count=count, chunk=chunk) for rank in range(num_ranks)]
    played = replay(topology, rows, labelled(num_ranks, num_ranks * count))
    for rank in range(num_ranks):
        expected = {index: ordered(topology, rank * count + index) for index in range(count)}
        assert played.elements[Memory.OUTPUT, rank] == expected
    for node in topology.nodes:
        assert sum(played.between_nodes[rank] for rank in node) == (num_ranks - len(node)) * count


@settings(deadline=None)
@given(topology=topologies, count=counts, chunk=chunks)
def test_all_reduce(topology, count, chunk):
    num_ranks = topology.num_ranks
    rows = [all_reduce(topology, rank, count=count, chunk=chunk) for rank in range(num_ranks)]
    played = replay(topology, rows, labelled(num_ranks, count))
    for rank in range(num_ranks):
        assert played.elements[Memory.OUTPUT, rank] == {i: ordered(topology, i) for i in range(count)}


@settings(deadline=None)
@given(num_ranks=st.integers(1, 6), count=counts)
def test_all_reduce_at_once(num_ranks, count):
    topology = Topology((tuple(range(num_ranks)),))
    rows = [all_reduce_at_once(topology, rank, count=count) for rank in range(num_ranks)]
    played = replay(topology, rows, labelled(num_ranks, count))
    for rank in range(num_ranks):
        assert played.elements[Memory.OUTPUT, rank] == {i: ordered(topology, i) for i in range(count)}


@settings(deadline=None)
@given(topology=topologies, count=counts, chunk=chunks, data=st.data())
def test_broadcast(topology, count, chunk, data):
    num_ranks = topology.num_ranks
    source = data.draw(st.integers(0, num_ranks - 1))
    rows = [broadcast(topology, rank, count=count, chunk=chunk, source=source) for rank in range(num_ranks)]
    given_by_source = [((source, index),) for index in range(count)]
    inputs = [given_by_source if rank == source else [] for rank in range(num_ranks)]
    played = replay(topology, rows, inputs)
    for rank in range(num_ranks):
        if rank != source:
            assert played.elements[Memory.OUTPUT, rank] == dict(enumerate(given_by_source))
    assert sum(played.between_nodes) == count * (len(topology.nodes) - 1)


@settings(deadline=None)
@given(topology=topologies, pieces=st.lists(st.integers(0, 20), max_size=4))
def test_gather_to_nodes(topology, pieces):
    num_ranks, total = topology.num_ranks, sum(pieces)
    rows = [gather_to_nodes(topology, rank, pieces=pieces) for rank in range(num_ranks)]
    played = replay(topology, rows, labelled(num_ranks, total))
    starts = list(accumulate(pieces, initial=0))
    whole = [
        ((rank, index),)
        for start, size in zip(starts, pieces, strict=False)
        for rank in range(num_ranks)
        for index in range(start, start + size)
    ]
    for node in topology.nodes:
        assert played.elements[Memory.SHARED, node[0]] == dict(enumerate(whole))
        elsewhere = len(topology.nodes) - 1
        assert sum(played.between_nodes[rank] for rank in node) == len(node) * total * elsewhere

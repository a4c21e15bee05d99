"""Chooses how an accelerator collective runs: by NCCL, or in hops over nodes; choices by size.

::

    all-gather       across ──▶ inside                      across: one rank of each node, all of these groups
    reduce-scatter   inside ──▶ across                              at the same time
    all-reduce       inside ──▶ across ──▶ inside           inside: the ranks of a node, all nodes at the same
    broadcast        across ──▶ inside                              time

With chunks, one chunk's hop overlaps the next chunk's hop on the other links.
"""

from collections.abc import Iterator
from itertools import pairwise

from shardwright.collectives.choose import BY_RANK, COLLECTIVES, Candidate, Choice, choose
from shardwright.collectives.prices import DevicePrices, Prices
from shardwright.collectives.steps import Topology
from shardwright.quantities import format_bytes

HIERARCHICAL, NCCL = "hierarchical", "nccl"

_CHUNK_BYTES = (2**20, 2**22, 2**24, 2**26)
_ALIGNMENT = 16

# The hops of a chunk, each with its share of the whole: all of it, or the part of one rank of the node.
_HOPS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "all_gather": (("across", "all_gather", "part"), ("inside", "all_gather", "all")),
    "reduce_scatter": (("inside", "reduce_scatter", "all"), ("across", "reduce_scatter", "part")),
    "all_reduce": (
        ("inside", "reduce_scatter", "all"),
        ("across", "all_reduce", "part"),
        ("inside", "all_gather", "all"),
    ),
    "broadcast": (("across", "broadcast", "all"), ("inside", "broadcast", "all")),
}


def choose_on_devices(
    collective: str, topology: Topology, *, count: int, itemsize: int, prices: DevicePrices
) -> Choice:
    """The cheapest way to do a collective on accelerators, and why.

    >>> from shardwright.collectives.prices import typical_device_prices
    >>> nodes = Topology.from_hosts("abc")
    >>> prices = typical_device_prices(nodes)
    >>> choice = choose_on_devices("all_gather", nodes, count=1000, itemsize=4, prices=prices)
    >>> choice.reason(4)  # doctest: +ELLIPSIS
    'nccl, 26.3 us; hierarchical is not possible: every rank is alone on its node (prices: defaults: ...)'
    """
    pieces = topology.num_ranks if collective in BY_RANK else 1
    num_bytes = count * itemsize * pieces
    everyone_s = prices.everyone[collective].seconds(num_bytes)
    obstacle = why_not_hierarchical(collective, topology)
    if obstacle:
        remark = f"{HIERARCHICAL} is not possible: {obstacle}"
        return Choice(Candidate(NCCL), everyone_s, {}, prices.source, remark)
    seconds, chunk = min(
        (_seconds(collective, topology, num_bytes, chunk * itemsize * pieces, prices), chunk)
        for chunk in _chunks(count, itemsize * pieces)
    )
    if everyone_s <= seconds:
        return Choice(Candidate(NCCL), everyone_s, {HIERARCHICAL: seconds}, prices.source)
    return Choice(Candidate(HIERARCHICAL, chunk), seconds, {NCCL: everyone_s}, prices.source)


def why_not_hierarchical(collective: str, topology: Topology) -> str:
    """What about the nodes rules out hops; empty where nothing does.

    >>> why_not_hierarchical("all_reduce", Topology.from_hosts("aaab"))
    'the nodes have different numbers of ranks (3, 1)'
    """
    sizes = [len(node) for node in topology.nodes]
    if len(sizes) == 1:
        return "all ranks are on one node"
    if len(set(sizes)) > 1:
        return f"the nodes have different numbers of ranks ({', '.join(map(str, sizes))})"
    if sizes[0] == 1:
        return "every rank is alone on its node"
    in_a_row = all(node == tuple(range(node[0], node[0] + len(node))) for node in topology.nodes)
    if collective in BY_RANK and not in_a_row:
        return f"the ranks of a node do not follow one another {topology.nodes}"
    return ""


def _chunks(count: int, bytes_of_one: int) -> Iterator[int]:
    """Elements of a piece for chunks of some sizes; the last is the whole."""
    for size in _CHUNK_BYTES:
        chunk = max(_ALIGNMENT, size // bytes_of_one // _ALIGNMENT * _ALIGNMENT)
        if chunk < count:
            yield chunk
    yield 0


def _seconds(
    collective: str, topology: Topology, num_bytes: int, bytes_at_once: int, prices: DevicePrices
) -> float:
    """Of chunks one behind the other: the first goes through all hops, then the busier links set the pace."""
    at_once = bytes_at_once or num_bytes
    num_chunks = max(1.0, num_bytes / max(at_once, 1))
    num_local = len(topology.nodes[0])
    busy_s = {"across": 0.0, "inside": 0.0}
    for where, hop, share in _HOPS[collective]:
        lines = prices.across if where == "across" else prices.inside
        busy_s[where] += lines[hop].seconds(at_once / (num_local if share == "part" else 1))
    if collective in BY_RANK:
        busy_s["inside"] += prices.reorder.seconds(at_once)
    return sum(busy_s.values()) + (num_chunks - 1) * max(busy_s.values())


_ITEMSIZE = 4
_SIZES = tuple(2**exponent for exponent in range(10, 27, 2))

Choices = dict[str, list[tuple[int, Choice]]]
"""For each collective, the choices by size, in bytes of the whole."""


def choices_by_size(topology: Topology, prices: Prices | DevicePrices) -> Choices:
    """The choices for float32, from 1 KiB to 64 MiB."""

    def chosen(collective: str, count: int) -> Choice:
        if isinstance(prices, DevicePrices):
            return choose_on_devices(collective, topology, count=count, itemsize=_ITEMSIZE, prices=prices)
        return choose(collective, topology, count=count, itemsize=_ITEMSIZE, prices=prices)

    found: Choices = {}
    for collective in COLLECTIVES:
        pieces = topology.num_ranks if collective in ("all_gather", "reduce_scatter") else 1
        found[collective] = [
            (num_bytes, chosen(collective, max(1, num_bytes // _ITEMSIZE // pieces))) for num_bytes in _SIZES
        ]
    return found


def crossovers(choices: Choices) -> list[str]:
    """A line for each collective: which algorithm it takes up to which size."""
    lines = []
    for collective, by_size in choices.items():
        parts = [by_size[0][1].candidate.name]
        for (_, before), (num_bytes, after) in pairwise(by_size):
            if before.candidate.name != after.candidate.name:
                parts.append(f"{after.candidate.name} from {format_bytes(num_bytes)}")
        lines.append(f"{collective}: {', '.join(parts)}")
    return lines

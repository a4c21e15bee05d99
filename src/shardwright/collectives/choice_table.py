"""Which algorithms a group takes by size, and where one gives way to another: for people to read."""

from collections.abc import Sequence
from itertools import pairwise

from shardwright.collectives.choose import COLLECTIVES, Choice, choose
from shardwright.collectives.prices import Prices
from shardwright.collectives.topology import Topology
from shardwright.units import format_bytes, format_seconds

__all__ = ["SIZES", "choice_rows", "choices_by_size", "crossovers"]

_ITEMSIZE = 4
SIZES = tuple(2**exponent for exponent in range(10, 27, 2))


def choices_by_size(
    collective: str, topology: Topology, prices: Prices, sizes: Sequence[int] = SIZES
) -> list[tuple[int, Choice]]:
    """The choice for float32 of each size, in bytes of the whole."""
    pieces = topology.num_ranks if collective in ("all_gather", "reduce_scatter") else 1
    found = []
    for num_bytes in sizes:
        count = max(1, num_bytes // _ITEMSIZE // pieces)
        found.append(
            (num_bytes, choose(collective, topology, count=count, itemsize=_ITEMSIZE, prices=prices))
        )
    return found


def choice_rows(topology: Topology, prices: Prices) -> list[list[str]]:
    """A table: a row for each collective and size."""
    rows = [["collective", "bytes", "algorithm", "chunk", "predicted", "others"]]
    for collective in COLLECTIVES:
        for num_bytes, choice in choices_by_size(collective, topology, prices):
            chunk = choice.candidate.chunk * _ITEMSIZE
            others = [f"{name} {format_seconds(s)}" for name, s in choice.others.items()]
            rows.append(
                [
                    collective,
                    format_bytes(num_bytes),
                    choice.candidate.name,
                    format_bytes(chunk) if chunk else "",
                    format_seconds(choice.seconds),
                    ", ".join(others),
                ]
            )
    return rows


def crossovers(topology: Topology, prices: Prices) -> list[str]:
    """A line for each collective: which algorithm it takes up to which size."""
    lines = []
    for collective in COLLECTIVES:
        choices = choices_by_size(collective, topology, prices)
        names = [choice.candidate.name for _, choice in choices]
        parts = [names[0]]
        for (_, before), (num_bytes, after) in pairwise(choices):
            if before.candidate.name != after.candidate.name:
                parts.append(f"{after.candidate.name} from {format_bytes(num_bytes)}")
        lines.append(f"{collective}: {', '.join(parts)}")
    return lines

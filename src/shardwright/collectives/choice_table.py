"""A readable table of a group's algorithms by size, and where one gives way to another."""

from itertools import pairwise

from shardwright.collectives.choose import COLLECTIVES, Choice, choose
from shardwright.collectives.choose_on_devices import choose_on_devices
from shardwright.collectives.prices import DevicePrices, Prices
from shardwright.collectives.topology import Topology
from shardwright.quantities import format_bytes, format_seconds

__all__ = ["Choices", "choice_rows", "choices_by_size", "crossovers"]

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


def choice_rows(choices: Choices) -> list[list[str]]:
    """A table: a row for each collective and size."""
    rows = [["collective", "bytes", "algorithm", "chunk", "predicted", "others"]]
    for collective, by_size in choices.items():
        for num_bytes, choice in by_size:
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

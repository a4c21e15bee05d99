"""The prices of a collective's steps, alpha seconds each and beta seconds per byte; their file."""

import math
import os
from bisect import bisect_right
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, TypeAdapter, field_validator

from shardwright.collectives.steps import Topology
from shardwright.errors import ConfigError
from shardwright.files import Record, UserFile, replace_file
from shardwright.files.user_file import NonNegative, Positive
from shardwright.quantities import MOST_RANKS

Finite = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]


def _ascending(points: tuple[tuple[float, float], ...]) -> tuple[tuple[float, float], ...]:
    if any(before >= after for (before, _), (after, _) in pairwise(points)):
        raise ValueError("the sizes must ascend")
    return points


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a line over bytes.

    >>> Line(alpha_s=1e-3, Bps=1e6).seconds(1000)
    0.002
    """

    alpha_s: NonNegative
    Bps: Positive

    def seconds(self, num_bytes: float) -> float:
        return self.alpha_s + num_bytes / self.Bps


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds that were measured at some sizes; straight lines go through them, and on behind the last.

    Attributes:
        points: bytes and seconds, by bytes; one at least.

    >>> curve = Curve(((0, 1.0), (100, 2.0), (200, 5.0)))
    >>> [curve.seconds(num_bytes) for num_bytes in (0, 50, 150, 300)]
    [1.0, 1.5, 3.5, 8.0]
    """

    points: Annotated[tuple[tuple[NonNegative, Finite], ...], Field(min_length=1), AfterValidator(_ascending)]

    def seconds(self, num_bytes: float) -> float:
        if num_bytes <= self.points[0][0] or len(self.points) == 1:
            return self.points[0][1]
        last = min(bisect_right(self.points, (num_bytes, float("inf"))), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[last - 1 : last + 1]
        return y0 + (y1 - y0) * (num_bytes - x0) / (x1 - x0)


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePrices:
    """The prices of NCCL collectives on accelerators: a line each, over the bytes of the whole.

    The whole of a collective is its largest tensor: an all-gather's output, a reduce-scatter's input.

    Attributes:
        across: over one rank of each node, while the other ranks do the same; empty where no group is such.
        inside: over the ranks of a node, while other nodes do the same; empty where no group is such.
        reorder: a copy that puts the pieces of ranks into another order.
        source: where the prices are from, for explanations.
    """

    everyone: dict[str, Line]
    across: dict[str, Line]
    inside: dict[str, Line]
    reorder: Line
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """The prices for a group's ranks.

    Attributes:
        own: what our collectives take on top of their steps, by the bytes of the whole; negative where steps
            are faster together than by themselves.
        copy: a copy of so many bytes, while all ranks of a node copy.
        combine: a sum, by the bytes that are read for it, while all ranks of a node sum.
        note_s: from telling to hearing, inside of a node.
        message: between two ranks of different nodes; its bytes a second are those of the whole node, in
            either direction.
        local_message: between two ranks of one node that do not use their shared memory.
        gloo: what gloo's own collectives take, by the bytes of the whole; empty where that was not measured.
        source: where the prices are from, for explanations.
        devices: of tensors on accelerators; None where that was not measured.
    """

    own: dict[str, Curve]
    copy: Line
    combine: Line
    note_s: float
    message: Line
    local_message: Line
    gloo: dict[str, Curve]
    source: str
    devices: DevicePrices | None = None


DEFAULT_PRICES = Prices(
    own=dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "broadcast"), Curve(((0, 5e-5),))),
    copy=Line(3e-6, 4e9),
    combine=Line(4e-6, 5e9),
    note_s=2.5e-5,
    message=Line(1.5e-4, 1.2e9),
    local_message=Line(1e-4, 1.5e9),
    gloo={},
    source="defaults: nothing was measured, run shardwright probe",
)
"""A host with several cores, and links of 10 Gbit/s between hosts."""


PRICES_VARIABLE = "SHARDWRIGHT_PRICES"
_FORMAT, _VERSION = "shardwright-prices", 2


Node = Annotated[list[Annotated[int, Field(ge=0, lt=MOST_RANKS)]], Field(min_length=1)]


class _Document(Record):
    format: Literal["shardwright-prices"]
    version: Literal[2]
    nodes: Annotated[list[Node], Field(min_length=1)]
    own: dict[str, Curve]
    copy_: Line = Field(alias="copy")
    combine: Line
    note_s: NonNegative
    message: Line
    local_message: Line
    gloo: dict[str, Curve]
    source: str
    devices: DevicePrices | None = None

    @field_validator("nodes")
    @classmethod
    def _each_once(cls, nodes: list[list[int]]) -> list[list[int]]:
        ranks = sorted(rank for node in nodes for rank in node)
        if ranks != list(range(len(ranks))):
            raise ValueError(f"the {len(ranks)} ranks of a group are 0 to {len(ranks) - 1}, each once")
        return nodes


def write_prices(path: str | os.PathLike[str], prices: Prices, topology: Topology) -> None:
    content: dict[str, Any] = {"format": _FORMAT, "version": _VERSION, "nodes": topology.nodes}
    document = _Document.model_validate({**content, **asdict(prices)})
    replace_file(path, document.model_dump_json(by_alias=True, indent=2) + "\n")


def read_prices(path: str | os.PathLike[str]) -> tuple[Prices, Topology]:
    advice = "shardwright probe measures them anew"
    file = UserFile(path, what="prices", error=ConfigError, advice=advice)
    found = file.model(_Document, file.read_json())
    plain = found.model_dump(by_alias=True, exclude={"format", "version", "nodes"})
    return TypeAdapter(Prices).validate_python(plain), Topology(tuple(map(tuple, found.nodes)))


# A node with NVLink, and a link of 200 Gbit/s to other nodes for each of its ranks.
_START_S = 1e-5
_HOP_INSIDE_S, _HOP_BETWEEN_S = 2e-6, 8e-6
_INSIDE_BPS, _BETWEEN_BPS = 2e11, 2.5e10
_REORDER = Line(5e-6, 1e12)


def typical_device_prices(topology: Topology) -> DevicePrices:
    """Typical prices of a group on accelerators."""
    num_nodes = len(topology.nodes)
    fewest, most = (pick(len(node) for node in topology.nodes) for pick in (min, max))
    links = [_BETWEEN_BPS * fewest] if num_nodes > 1 else [_INSIDE_BPS]
    if most > 1:
        links.append(_INSIDE_BPS)
    return DevicePrices(
        everyone=_default_lines(num_nodes, most, min(links)),
        across=_default_lines(num_nodes, 1, _BETWEEN_BPS) if num_nodes > 1 else {},
        inside=_default_lines(1, most, _INSIDE_BPS) if most > 1 else {},
        reorder=_REORDER,
        source="defaults: nothing was measured, run shardwright probe on GPUs",
    )


def _default_lines(num_nodes: int, num_local: int, slowest: float) -> dict[str, Line]:
    num_ranks = num_nodes * num_local
    moved = max(num_ranks - 1, 1) / num_ranks  # of the bytes of the whole
    hops_between = num_nodes if num_nodes > 1 and num_local > 1 else num_nodes - 1
    round_s = hops_between * _HOP_BETWEEN_S + (num_ranks - num_nodes) * _HOP_INSIDE_S
    tree_s = math.ceil(math.log2(num_nodes)) * _HOP_BETWEEN_S + (num_local - 1) * _HOP_INSIDE_S
    ring = Line(_START_S + round_s, slowest / moved)
    return {
        "all_gather": ring,
        "reduce_scatter": ring,
        "all_reduce": Line(_START_S + 2 * tree_s, slowest / (2 * moved)),
        "broadcast": Line(_START_S + round_s, slowest),
    }

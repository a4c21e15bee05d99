"""The prices of a collective's steps: alpha seconds each, and beta seconds per byte."""

from bisect import bisect_right
from dataclasses import dataclass

__all__ = ["DEFAULT_PRICES", "Curve", "DevicePrices", "Line", "Prices"]


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds as a line over bytes.

    Attributes:
        alpha_s: of no bytes.
        Bps: further bytes in a second.

    >>> Line(alpha_s=1e-3, Bps=1e6).seconds(1000)
    0.002
    """

    alpha_s: float
    Bps: float

    def seconds(self, num_bytes: float) -> float:
        """Time for so many bytes."""
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

    points: tuple[tuple[float, float], ...]

    def seconds(self, num_bytes: float) -> float:
        """Time for so many bytes."""
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
        everyone: over all ranks of the group.
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

"""What the steps of a collective cost: alpha seconds each, and beta seconds a byte."""

from dataclasses import dataclass

__all__ = ["DEFAULT_PRICES", "Line", "Prices"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """What a group's ranks pay.

    Attributes:
        own: what our collectives take on top of their steps, by the bytes of the whole.
        copy: a copy of so many bytes, while all ranks of a node copy.
        combine: a sum, by the bytes that are read for it, while all ranks of a node sum.
        note_s: from telling to hearing, inside of a node.
        message: between two ranks of different nodes; its bytes a second are those of the whole node, in
            either direction.
        local_message: between two ranks of one node that do not use their shared memory.
        gloo: what gloo's own collectives take, by the bytes of the whole; empty where that was not measured.
        source: where the prices are from, for explanations.
    """

    own: dict[str, Line]
    copy: Line
    combine: Line
    note_s: float
    message: Line
    local_message: Line
    gloo: dict[str, Line]
    source: str


DEFAULT_PRICES = Prices(
    own=dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "broadcast"), Line(5e-5, 1e12)),
    copy=Line(3e-6, 4e9),
    combine=Line(4e-6, 5e9),
    note_s=2.5e-5,
    message=Line(1.5e-4, 1.2e9),
    local_message=Line(1e-4, 1.5e9),
    gloo={},
    source="defaults: nothing was measured, run shardwright probe",
)
"""A host with several cores, and links of 10 Gbit/s between hosts."""

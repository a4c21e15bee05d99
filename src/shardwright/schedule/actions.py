"""The actions of a pipeline rank.

An *action* is a stage's forward for one microbatch, its backward, one end of a transfer, or a copy to or from
host memory. The text form is PyTorch's: stage, kind, microbatch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from math import isfinite

from shardwright.errors import ScheduleError
from shardwright.profile import Cost


class Kind(StrEnum):
    """Kinds of actions.

    A whole backward ``B`` computes the gradients of a stage's inputs and of its weights. Split in two, ``I``
    computes those of the inputs, for which the stage before waits, and ``W`` those of the weights, for which
    nobody waits.

    ``OFFLOAD`` copies what a forward has kept for its backward to the memory of the host, and ``LOAD`` copies
    it back. Both start where they stand in the row, and run beside what comes next.
    """

    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    OFFLOAD = "OFFLOAD"
    LOAD = "LOAD"


COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
"""Kinds that occupy the device."""

TRANSFERS = (Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B)
"""Kinds that move a tensor between two ranks."""

HOST_COPIES = (Kind.OFFLOAD, Kind.LOAD)
"""Kinds that move what a stage keeps to the memory of the host and back."""


@dataclass(frozen=True, slots=True)
class Action:
    """One piece of work of one stage for one microbatch.

    Attributes:
        stage: the stage that does it; for a transfer, the stage that sends or receives.
        microbatch: which microbatch, from 0.
        peer: the other stage of a transfer; None for all else.

    >>> str(Action(Kind.FORWARD, 2, 3)), str(Action(Kind.SEND_F, 1, 0, peer=2))
    ('2F3', '1SEND_F0')
    """

    kind: Kind
    stage: int
    microbatch: int
    peer: int | None = None

    @property
    def is_compute(self) -> bool:
        """Whether it occupies the device."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Edge:
    """Tensors that one stage makes and a later one uses, for one microbatch.

    Attributes:
        target: the stage that uses them; larger than `source`, but not always the next (a skip connection).
        gradient_bytes: bytes of the gradients sent back; None means `num_bytes`.
        has_gradient: False where no gradient returns (integer tensors, frozen parts).

    >>> Edge(0, 2, num_bytes=64).backward_bytes, Edge(0, 1, has_gradient=False).backward_bytes
    (64, 0)
    """

    source: int
    target: int
    num_bytes: int = 0
    gradient_bytes: int | None = None
    has_gradient: bool = True

    @property
    def backward_bytes(self) -> int:
        if not self.has_gradient:
            return 0
        return self.num_bytes if self.gradient_bytes is None else self.gradient_bytes


def chain_edges(num_stages: int, *, num_bytes: int = 0) -> tuple[Edge, ...]:
    """Each stage feeds the next one.

    >>> [(edge.source, edge.target) for edge in chain_edges(3)]
    [(0, 1), (1, 2)]
    """
    return tuple(Edge(stage, stage + 1, num_bytes) for stage in range(num_stages - 1))


def check_edges(edges: Sequence[Edge] | None, *, num_stages: int) -> tuple[Edge, ...]:
    """The edges in order, `chain_edges` where none are given."""
    if edges is None:
        return chain_edges(num_stages)
    pairs = set()
    for edge in edges:
        if not 0 <= edge.source < edge.target < num_stages:
            raise ScheduleError(
                f"edge {edge.source} -> {edge.target} is not possible among {num_stages} stages. "
                f"An edge points from a stage to a later one, both from 0 to {num_stages - 1}."
            )
        pairs.add((edge.source, edge.target))
    if len(pairs) != len(edges):
        raise ScheduleError(
            f"{len(edges)} edges join only {len(pairs)} pairs of stages. "
            "Give one edge a pair, with the bytes of all its tensors."
        )
    return tuple(sorted(edges, key=lambda edge: (edge.source, edge.target)))


@dataclass(frozen=True, slots=True)
class StageCost(Cost):
    """Seconds and bytes of one stage for one microbatch.

    Attributes:
        recompute_s: seconds of forward that the backward repeats first (in ``I`` where the backward is
            split).
        offload_bytes: bytes that leave for the host unit by unit, beginning in the forward, and come back so
            in the backward; `saved_bytes` are then what stays. 0: a copy moves all `saved_bytes` at once,
            behind the forward and ahead of the backward.
        window_bytes: of them, the most that are there while an action of the stage runs.
        tail_bytes: of these, what leaves behind the forward, and comes back ahead of the backward.

    >>> StageCost(forward_s=1.0, backward_s=2.0, weight_s=0.5).seconds(Kind.BACKWARD_INPUT)
    1.5
    """

    recompute_s: float = 0.0
    offload_bytes: int = 0
    window_bytes: int = 0
    tail_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None and not (isfinite(value) and value >= 0):
                raise ScheduleError(f"{field.name} of a stage is {value}. Give a finite number, 0 or more.")
        if self.input_s is None and self.weight_s > self.backward_s:
            raise ScheduleError(
                f"weight_s ({self.weight_s}) of a stage is larger than backward_s ({self.backward_s}), "
                "of which it is a part. Give the whole backward as backward_s."
            )

    @property
    def copied_bytes(self) -> int:
        """Bytes that ``OFFLOAD`` moves, and ``LOAD``."""
        return self.tail_bytes if self.offload_bytes else self.saved_bytes

    @property
    def beside_bytes(self) -> int:
        """Bytes that leave while the forward runs, and come back while the backward does."""
        return self.offload_bytes - self.tail_bytes

    def changes(self, kind: Kind, *, copied: bool) -> tuple[int, int]:
        """Bytes that are kept from the start of an action on, and from its end.

        Args:
            kind: of the action, or of a copy.
            copied: the schedule has copies for its microbatch.
        """
        kept, around = self.saved_bytes + self.offload_bytes, 0
        if copied and self.offload_bytes:
            # While an action runs, units are there that are not between the two.
            kept, around = self.saved_bytes + self.window_bytes, self.window_bytes - self.tail_bytes
        return {
            Kind.FORWARD: (kept, -around),
            Kind.OFFLOAD: (0, -self.copied_bytes),
            Kind.LOAD: (self.copied_bytes, 0),
            Kind.BACKWARD: (around, -kept),
            Kind.BACKWARD_INPUT: (around, self.left_bytes - kept),
            Kind.BACKWARD_WEIGHT: (0, -self.left_bytes),
        }[kind]

    @property
    def whole(self) -> Cost:
        """The same cost, with recomputation as a part of the backward."""
        return Cost(
            forward_s=self.forward_s,
            backward_s=self.backward_s + self.recompute_s,
            weight_s=self.weight_s,
            saved_bytes=self.saved_bytes,
            weight_bytes=self.weight_bytes,
            input_s=None if self.input_s is None else self.input_s + self.recompute_s,
        )

    def seconds(self, kind: Kind) -> float:
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD:
            return self.recompute_s + self.backward_s
        if kind is Kind.BACKWARD_INPUT:
            return self.recompute_s + self.rest_s
        if kind is Kind.BACKWARD_WEIGHT:
            return self.weight_s
        raise ScheduleError(f"a stage has no seconds for {kind.value}: transfers are priced by their link.")


def unit_costs(num_stages: int) -> tuple[StageCost, ...]:
    """Forward, ``I`` and ``W`` of one second each: the costs for which papers draw schedules."""
    return (StageCost(1.0, 2.0, 1.0, 1),) * num_stages


def check_costs(costs: Sequence[StageCost] | None, *, num_stages: int) -> tuple[StageCost, ...]:
    """The costs of all stages, `unit_costs` where none are given."""
    if costs is None:
        return unit_costs(num_stages)
    if len(costs) != num_stages:
        raise ScheduleError(
            f"{len(costs)} costs were given for {num_stages} stages. Give one for each stage."
        )
    return tuple(costs)

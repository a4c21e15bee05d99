"""The cost of one stage for one microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

from shardwright.errors import ScheduleError
from shardwright.profile import Cost
from shardwright.schedule.actions import Kind

__all__ = ["StageCost", "check_costs", "unit_costs"]


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
        """Seconds of a compute action of this stage."""
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

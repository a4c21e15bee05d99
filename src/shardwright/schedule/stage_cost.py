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

    >>> StageCost(forward_s=1.0, backward_s=2.0, weight_s=0.5).seconds(Kind.BACKWARD_INPUT)
    1.5
    """

    recompute_s: float = 0.0

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

    def scaled(self, *, seconds: float, num_bytes: float) -> "StageCost":
        """The cost with so many times the seconds and the bytes."""
        if seconds == num_bytes == 1.0:
            return self
        return StageCost(
            forward_s=self.forward_s * seconds,
            backward_s=self.backward_s * seconds,
            weight_s=self.weight_s * seconds,
            saved_bytes=round(self.saved_bytes * num_bytes),
            recompute_s=self.recompute_s * seconds,
            weight_bytes=None if self.weight_bytes is None else round(self.weight_bytes * num_bytes),
            input_s=None if self.input_s is None else self.input_s * seconds,
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
    """The costs of all stages, `unit_costs` where none are given.

    Raises:
        ScheduleError: there is not one for every stage.
    """
    if costs is None:
        return unit_costs(num_stages)
    if len(costs) != num_stages:
        raise ScheduleError(
            f"{len(costs)} costs were given for {num_stages} stages. Give one for each stage."
        )
    return tuple(costs)

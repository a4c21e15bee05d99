"""What one stage costs for one microbatch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import isfinite

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Kind

__all__ = ["StageCost", "check_costs", "unit_costs"]


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage for one microbatch.

    Attributes:
        forward_s: seconds of the forward.
        backward_s: seconds of the whole backward, recomputation not counted.
        weight_s: the part of the backward that can be put off (``W``).
        saved_bytes: bytes kept from the start of the forward.
        recompute_s: seconds of forward that the backward repeats first (in ``I`` where the backward is
            split).
        weight_bytes: the bytes that ``I`` leaves for ``W``; None means all of `saved_bytes`, because the
            gradients of weights need the inputs of every layer.
        input_s: seconds of ``I``, recomputation not counted; None means what `weight_s` leaves of
            `backward_s`. In two parts a backward may take longer than in one.

    >>> StageCost(forward_s=1.0, backward_s=2.0, weight_s=0.5).seconds(Kind.BACKWARD_INPUT)
    1.5
    """

    forward_s: float
    backward_s: float
    weight_s: float = 0.0
    saved_bytes: int = 0
    recompute_s: float = 0.0
    weight_bytes: int | None = None
    input_s: float | None = None

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

    def seconds(self, kind: Kind) -> float:
        """Seconds of a compute action of this stage."""
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD:
            return self.recompute_s + self.backward_s
        if kind is Kind.BACKWARD_INPUT:
            input_s = self.backward_s - self.weight_s if self.input_s is None else self.input_s
            return self.recompute_s + input_s
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

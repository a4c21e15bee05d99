"""The request to a schedule family."""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import Action
from shardwright.schedule.placement import check_placement
from shardwright.schedule.stage_cost import StageCost, check_costs

__all__ = ["Request", "Rows", "check_request"]

Rows = list[list[Action]]
"""The compute actions of each rank, in order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The request to a schedule family.

    Attributes:
        stage_ranks: pipeline rank of each stage.
        num_microbatches: parts into which a batch is split.
        active_microbatches: bound on the microbatches under way on each rank; None for the family's own.
    """

    stage_ranks: tuple[int, ...]
    num_microbatches: int
    active_microbatches: int | None
    costs: tuple[StageCost, ...]

    @property
    def num_ranks(self) -> int:
        """Pipeline ranks."""
        return max(self.stage_ranks) + 1

    @property
    def num_stages(self) -> int:
        """Stages of the model."""
        return len(self.stage_ranks)


def check_request(
    kind: str,
    *,
    stage_ranks: Sequence[int],
    num_microbatches: int,
    active_microbatches: int | None,
    costs: Sequence[StageCost] | None,
) -> Request:
    """The request in checked form."""
    ranks = check_placement(stage_ranks)
    if num_microbatches < 1:
        raise ScheduleError(f"{kind} was asked for with {num_microbatches} microbatches. Give 1 or more.")
    if active_microbatches is not None and active_microbatches < 1:
        raise ScheduleError(
            f"{kind} was asked for with active_microbatches {active_microbatches}: nothing could start. "
            "The minimum is 1; leave it out for the family's own bound."
        )
    return Request(
        stage_ranks=ranks,
        num_microbatches=num_microbatches,
        active_microbatches=active_microbatches,
        costs=check_costs(costs, num_stages=len(ranks)),
    )

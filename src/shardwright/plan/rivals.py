"""The plans that were not taken: runners-up by prediction, and trials on the machines."""

from typing import Annotated

from pydantic import Field, NonNegativeInt

from shardwright.files import Record
from shardwright.limits import MOST_RANKS, MOST_STAGES_OF_RANK, MOST_STEPS
from shardwright.plan.conditions import Seconds
from shardwright.plan.decision import MeshPlan, Microbatches, SchedulePlan

__all__ = ["Alternative", "Trial"]


class Alternative(Record):
    """A runner-up, and its predicted cost."""

    schedule: str
    microbatches: Microbatches
    stages: Annotated[int, Field(ge=1, le=MOST_RANKS * MOST_STAGES_OF_RANK)]
    step_s: Seconds
    peak_bytes: NonNegativeInt
    verdict: str


class Trial(Record):
    """A plan that was tried on the machines that it was made for.

    Attributes:
        mesh: degrees and rank layout.
        schedule: order of work.
        step_s: seconds of a step as it was measured: the median, on the slowest rank, without the optimizer.
        predicted_s: the same as it was predicted.
        steps: that were timed.
    """

    mesh: MeshPlan
    schedule: SchedulePlan
    step_s: Seconds
    predicted_s: Seconds
    steps: Annotated[int, Field(ge=1, le=MOST_STEPS)]

"""Compares the plan of a run with what its recorded steps show: costs, and a plan, for the next run.

::

    recorded steps ─► seconds of stages ─► factors of units, kept beside the plan of the last run
                                                │ at the end
                                                ▼
                              the planner again, at corrected costs ─► this plan, or another one
"""

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from shardwright.errors import ShardwrightError
from shardwright.model_graph import ModelGraph
from shardwright.observe.next_plan import NextPlan
from shardwright.observe.timeline import MeasuredEvent
from shardwright.plan import Plan
from shardwright.planner import corrected_profile, factors_of_units, seconds_of_stages
from shardwright.planner.explain.plan_replay import base_setting, play
from shardwright.profile import Profile
from shardwright.quantities import format_seconds
from shardwright.schedule.actions import COMPUTE, Kind

__all__ = ["PlanReview"]

log = logging.getLogger(__name__)

_WARM_UP_STEPS = 2
_LEAST_STEPS = 3  # recorded after these; one alone may be a slow second of the machine
_LATEST = 20


@dataclass(slots=True)
class PlanReview:
    """The review of one run, on its first rank.

    Attributes:
        graph: of a microbatch.
        profile: that the plan was made with.
        plan: that the run follows.
        before: factors of unit calls, by label, that the profile has already.
        plan_with: makes the plan of the next run, given its profile.
        keep: keeps the factors of unit calls for the next run.
    """

    graph: ModelGraph
    profile: Profile
    plan: Plan
    before: Mapping[str, float]
    plan_with: Callable[[Profile], Plan]
    keep: Callable[[Mapping[str, float]], None]
    _num_seen: int = 0
    _stage_s: deque[tuple[float, ...]] = field(default_factory=lambda: deque(maxlen=_LATEST))
    _factors: dict[str, float] = field(default_factory=dict)

    def step_recorded(self, events: Sequence[MeasuredEvent], *, outside_s: float = 0.0) -> None:
        """A step was recorded.

        Args:
            events: its actions on all ranks of the first replica.
            outside_s: seconds of them outside of units, on the first rank. The others run the same.
        """
        self._num_seen += 1
        if self._num_seen <= _WARM_UP_STEPS:
            return
        self._stage_s.append(self._seconds(events, outside_s))
        if not self.is_done:
            return
        middle = [median(column) for column in zip(*self._stage_s, strict=True)]
        found = factors_of_units(self.graph, self.profile, self.plan, middle)
        if found != self._factors:
            self._factors = found
            now = {label: self.before.get(label, 1.0) * factor for label, factor in found.items()}
            self.keep({**self.before, **now})

    @property
    def is_done(self) -> bool:
        """Whether enough steps were recorded to say anything."""
        return len(self._stage_s) >= _LEAST_STEPS

    def next_plan(self) -> NextPlan | None:
        """What the planner would choose at the corrected costs; None: this plan."""
        if not self._factors:
            return None
        profile = corrected_profile(self.profile, self.graph, self._factors)
        try:
            found = self.plan_with(profile)
            this_s = self._step_s(profile)
        except ShardwrightError as error:  # a review must not fail a run that is done
            log.info("no plan for the next run: %s", error)
            return None
        if found.stages == self.plan.stages and found.schedule == self.plan.schedule:
            return None
        assert found.prediction is not None
        next_s = found.prediction.step_s
        starts = [stage.units[0] for stage in found.stages[1:] if stage.units]
        cuts = ", ".join(starts[:3]) + (", ..." if len(starts) > 3 else "")
        text = (
            f"stages took other times than planned: {found.schedule.kind} with cuts before {cuts} is "
            f"predicted at {format_seconds(next_s)} a step, this plan at {format_seconds(this_s)}"
        )
        return NextPlan(found, text)

    def _seconds(self, events: Sequence[MeasuredEvent], outside_s: float) -> tuple[float, ...]:
        """Seconds of work of each stage for one microbatch, without what its rank does outside of units."""
        conditions = None if self.plan.prediction is None else self.plan.prediction.conditions
        overhead_s = dict.fromkeys(COMPUTE, 0.0 if conditions is None else conditions.action_overhead_s)
        overhead_s[Kind.FORWARD] += 0.0 if conditions is None else conditions.forward_overhead_s
        totals = [0.0] * len(self.plan.stages)
        for event in events:
            if event.action.kind in COMPUTE:
                totals[event.action.stage] += max(0.0, event.busy_s - overhead_s[event.action.kind])
        for first in {rank: stage for stage, rank in reversed([*enumerate(self.plan.stage_ranks)])}.values():
            totals[first] = max(0.0, totals[first] - outside_s)
        return tuple(total / self.plan.schedule.microbatches for total in totals)

    def _step_s(self, profile: Profile) -> float:
        """Predicted seconds of a step of this plan at other costs of its units."""
        prediction = self.plan.prediction
        assert prediction is not None
        planned, corrected = (
            seconds_of_stages(self.graph, each, self.plan) for each in (self.profile, profile)
        )
        stages = tuple(
            stage.model_copy(
                update={
                    name: value * now_s / then_s
                    for name in ("forward_s", "backward_s", "weight_s", "input_s", "recompute_s")
                    if (value := getattr(stage, name)) is not None
                }
            )
            for stage, then_s, now_s in zip(prediction.stages, planned, corrected, strict=True)
        )
        changed = prediction.model_copy(update={"stages": stages})
        return play(base_setting(self.plan.model_copy(update={"prediction": changed}))).step_s

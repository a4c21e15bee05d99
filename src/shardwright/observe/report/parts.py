"""What a step is spent on, in parts that can be measured: each as predicted and as measured.

::

    |  forward  |  backward  | imbalance | waiting |  around  |
    |<- mean of the ranks' work ->|      |         |          |
    |<----- work of the busiest rank --->|         |          |
    |<----------- from the first action to the last ->|       |
    |<------------------------- step ----------------------->|

Both columns are computed alike: one from the replayed plan, one from a recorded step. What is predicted in
finer parts (bubble, messages, sums over replicas) is listed below the part that it belongs to.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from shardwright.observe.report.measured import WORK, MeasuredTimeline, Span
from shardwright.plan import Plan
from shardwright.planner.waterfall import Part, Waterfall


@dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """A figure as predicted and as measured; None where it is not known."""

    predicted: float | None
    measured: float | None

    @property
    def difference(self) -> float | None:
        if self.predicted is None or self.measured is None:
            return None
        return self.measured - self.predicted


def worst_of(rows: Iterable[Beside], *, least: float = 0.0) -> int | None:
    """The number of the row that is furthest above its prediction; None where none is above it.

    >>> worst_of(Beside(predicted=a, measured=b) for a, b in ((1.0, 1.5), (3.0, 3.6), (None, 9.0)))
    1
    """
    above = [(row.difference, -number) for number, row in enumerate(rows) if row.difference is not None]
    most, number = max(above, default=(0.0, 0))
    return -number if most > least else None


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure as predicted and as measured; None where it is not known.

    Attributes:
        predicted: in the unit that the name ends with.
        remark: why the two are not to be compared; empty where they are.
    """

    name: str
    predicted: float | None
    measured: float | None
    remark: str = ""

    @property
    def above(self) -> float | None:
        """measured / predicted - 1; None where one is not known, or they are not to be compared."""
        if not self.predicted or self.measured is None or self.remark:
            return None
        return self.measured / self.predicted - 1.0

    def to_dict(self) -> dict[str, Any]:
        name, _, unit = self.name.removesuffix(")").rpartition(" (")
        return {
            "name": name,
            f"predicted_{unit}": self.predicted,
            f"measured_{unit}": self.measured,
            "above_prediction": self.above,
            "remark": self.remark,
        }


MeasuredPartKind = Literal["forward", "backward", "imbalance", "waiting", "around"]

_MEANINGS: dict[MeasuredPartKind, str] = {
    "forward": "Mean of the ranks, with code outside of the model.",
    "backward": "Mean of the ranks, with what it recomputes.",
    "imbalance": "Work of the busiest rank above the mean.",
    "waiting": "The busiest rank waits for others, or for messages.",
    "around": "Before the first action and after the last: sums over ranks, the runtime.",
}
_BELONGS: dict[str, MeasuredPartKind] = {
    "forward": "forward",
    "backward": "backward",
    "recomputation": "backward",
    "imbalance": "imbalance",
    "bubble": "waiting",
    "copies to the host": "waiting",
    "messages: latency": "waiting",
    "messages: bytes": "waiting",
    "messages: copying": "waiting",
    "sums of tied gradients": "around",
    "sums over tensor-parallel ranks": "around",
    "sums over replicas": "around",
    "before and after the schedule": "around",
    "not explained": "around",
}
"""Finer parts of a prediction that lie in one part alone; others are spread over several."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPart(Beside):
    """One part of a step, in seconds; None where it is not known.

    Attributes:
        finer: the parts that the prediction has in its place.
    """

    kind: MeasuredPartKind
    finer: tuple[Part, ...] = ()

    @property
    def meaning(self) -> str:
        return _MEANINGS[self.kind]


def step_parts(
    plan: Plan | None,
    spans: Sequence[Span],
    waterfall: Waterfall | None,
    timeline: MeasuredTimeline | None,
    *,
    num_ranks: int,
    schedule_s: float,
) -> tuple[StepPart, ...]:
    """The parts of a step; none where nothing was predicted and nothing recorded.

    Args:
        spans: predicted ones, of a schedule that takes `schedule_s`; empty where there are none.
    """
    predicted = measured = None
    if plan is not None and plan.prediction is not None and spans:
        predicted = _seconds(spans, num_ranks, schedule_s, plan.prediction.step_s)
    if timeline is not None and timeline.schedule_s:
        step_s = timeline.seconds
        measured = _seconds(timeline.spans, num_ranks, timeline.schedule_s, step_s)
    if predicted is None and measured is None:
        return ()
    finer = () if waterfall is None else waterfall.parts
    found = []
    for kind in _MEANINGS:
        own = tuple(part for part in finer if _BELONGS.get(part.name) == kind and part.name != kind)
        predicted_s = None if predicted is None else predicted.get(kind)
        measured_s = None if measured is None else measured.get(kind)
        found.append(StepPart(kind=kind, predicted=predicted_s, measured=measured_s, finer=own))
    return tuple(found)


def spent_of(parts: Sequence[StepPart]) -> tuple[Compared, ...]:
    """What ranks spend a step on, in fewer parts: the mean of them."""
    named: dict[str, tuple[MeasuredPartKind, ...]] = {
        "forward (s)": ("forward",),
        "backward (s)": ("backward",),
        "waiting and idle (s)": ("imbalance", "waiting"),
    }
    found = []
    for name, kinds in named.items():
        own = [part for part in parts if part.kind in kinds]
        predicted, measured = ([getattr(part, each) for part in own] for each in ("predicted", "measured"))
        found.append(Compared(name, sum_of(predicted), sum_of(measured)))
    return tuple(found)


def sum_of(values: Sequence[float | None]) -> float | None:
    """None where one is not known, or there are none."""
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _seconds(
    spans: Sequence[Span], num_ranks: int, schedule_s: float, step_s: float | None
) -> dict[MeasuredPartKind, float]:
    sums = {"forward": 0.0, "backward": 0.0}
    busy_s = [0.0] * num_ranks
    for span in spans:
        if span.kind in WORK and span.rank < num_ranks:
            sums[WORK[span.kind]] += (span.end_s - span.start_s) / num_ranks
            busy_s[span.rank] += span.end_s - span.start_s
    found: dict[MeasuredPartKind, float] = {
        "forward": sums["forward"],
        "backward": sums["backward"],
        "imbalance": max(busy_s) - sum(sums.values()),
        "waiting": schedule_s - max(busy_s),
    }
    if step_s is not None:
        found["around"] = step_s - schedule_s
    return found

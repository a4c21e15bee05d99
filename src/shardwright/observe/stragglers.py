"""Ranks that the others wait for: which, since when, for how much of a step.

A rank's own seconds of a step are those in which it waits for nobody: the work of its actions, and what its
script does between the steps. The others wait for what one has more of them than is its due::

    rank 0   ████████░░░░░░░░░░░░   own 0.2 s, due 0.2 s
    rank 1   ████████████████████   own 0.6 s, due 0.2 s: slow by 0.4 s, two thirds of the step

What is due follows from the other ranks: a rank's share of the plan's work, or of what it had in its first
steps, times how much longer than that the others took. So a busy host, on which all are slow, accuses nobody.
A rank is named once its excess has been a large share of step after step, for some seconds: not one that is
slow now and then. A single long pause is named, too.

Ranks that share layers wait for each other inside of their work, so each counts with the work of the one that
has least: of these, only what they do between steps tells them apart.
"""

from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from shardwright.plan import Plan
from shardwright.quantities import format_seconds

_EARLY = 3
"""The first steps trace, plan, and size what the others keep."""
_WINDOW, _EXCEPTIONS, _LONG_S = 20, 2, 3.0
_SHARE, _SHARE_BY_PLAN, _SHARE_BY_ESTIMATE = 0.15, 0.3, 0.6
_OVER = 0.5
"""Of the share: below it a slow rank is none any more."""
_PAUSE_S, _PAUSE_TIMES, _REST_TIMES = 1.0, 3.0, 1.5
_MOST_PAUSES = 3


@dataclass(frozen=True, slots=True)
class Slow:
    """The rank that others waited for in a step.

    Attributes:
        excess_s: its own seconds beyond those that were its due.
        told: a line for people, where there is something new to say; it may be of the step before.
    """

    rank: int
    excess_s: float
    told: str = ""


class Stragglers:
    """Judges the steps of a run one after the other, on the rank that reports."""

    def __init__(self, pipeline_rank: Sequence[int], share_layers: Iterable[tuple[int, ...]] = ()) -> None:
        self._pipeline_rank = pipeline_rank  # of each world rank
        self._share_layers = [ranks for ranks in share_layers if len(ranks) > 1]
        self._weights: list[float] = [1.0] * len(pipeline_rank)
        self._share_by_plan = 1.0
        self._by_history = False
        self._alike = len(set(pipeline_rank)) == 1
        self._steps = 0
        self._own: deque[Sequence[float]] = deque(maxlen=_WINDOW)
        self._excess: deque[Sequence[float]] = deque(maxlen=_WINDOW)
        self._between: deque[Sequence[float]] = deque(maxlen=_WINDOW)
        self._cycles: deque[float] = deque(maxlen=_WINDOW)
        self._named: int | None = None
        self._pauses = 0
        self._pause: Slow | None = None

    def follow(self, plan: Plan) -> None:
        """Takes the work of each rank from a plan."""
        prediction = plan.prediction
        if prediction is None:
            return
        work: Counter[int] = Counter()
        for rank, stage in zip(plan.stage_ranks, prediction.stages, strict=True):
            work[rank] += stage.cost.forward_s + stage.cost.backward_s  # type: ignore[assignment]
        if all(work[rank] > 0 for rank in self._pipeline_rank):
            self._weights = [work[rank] for rank in self._pipeline_rank]
            is_measured = prediction.provenance == "measured"
            self._share_by_plan = _SHARE_BY_PLAN if is_measured else _SHARE_BY_ESTIMATE

    def step(
        self,
        number: int,
        *,
        seconds: float,
        work_s: Sequence[float],
        between_s: Sequence[float],
        held_up_s: Sequence[float],
    ) -> Slow | None:
        """Judges a step.

        Args:
            seconds: of the step, on the first rank.
            work_s: of each rank, without waiting.
            between_s: what each rank did between the step before and this one.
            held_up_s: for how long each rank could run no Python.
        """
        self._steps += 1
        own = [work + between for work, between in zip(work_s, between_s, strict=True)]
        for ranks in self._share_layers:
            least_s = min(work_s[rank] for rank in ranks)
            for rank in ranks:
                own[rank] = least_s + between_s[rank]
        cycle_s = seconds + between_s[0]
        if self._steps <= _EARLY or len(own) == 1:
            return None
        excess = self._beyond_due(own)
        slowest = max(range(len(own)), key=excess.__getitem__)
        paused = self._paused(number, cycle_s, excess[slowest], slowest, held_up_s)
        self._own.append(own)
        self._excess.append(excess)
        self._between.append(between_s)
        self._cycles.append(cycle_s)
        if self._named is not None:
            return self._goes_on(excess, cycle_s)
        before, self._pause = self._pause, paused
        if paused is not None:
            return Slow(paused.rank, paused.excess_s)
        if before is not None and excess[before.rank] < before.excess_s / 2:  # else it is slow for good
            return self._told_of_pause(before)
        return self._sets_in(number)

    def _beyond_due(self, own: Sequence[float]) -> list[float]:
        """Of each rank, seconds beyond its due: judged by the median of the others."""
        ratios = [each / weight for each, weight in zip(own, self._weights, strict=True)]
        order = sorted(range(len(own)), key=ratios.__getitem__)
        excess = [0.0] * len(own)
        for place, rank in enumerate(order):
            low, high = (k + (k >= place) for k in ((len(own) - 2) // 2, (len(own) - 1) // 2))
            others = (ratios[order[low]] + ratios[order[high]]) / 2
            excess[rank] = own[rank] - self._weights[rank] * others
        return excess

    def _sets_in(self, number: int) -> Slow | None:
        if len(self._own) < _WINDOW or sum(self._cycles) < _LONG_S:
            return None
        cycle_s = median(self._cycles)
        share = _SHARE if self._by_history or self._alike else self._share_by_plan
        for rank, latest_s in enumerate(self._excess[-1]):
            if latest_s < share * cycle_s:
                continue
            excess = [step[rank] for step in self._excess]
            if sorted(excess)[_EXCEPTIONS] > share * cycle_s:
                self._named, excess_s = rank, median(excess)
                return Slow(rank, excess_s, self._told(rank, excess_s, cycle_s, number))
        if not self._by_history and not self._alike:
            # Of their faster steps: one that became slow meanwhile is not judged by that.
            usual = [sorted(each)[_WINDOW // 4] for each in zip(*self._own, strict=True)]
            self._by_history = all(usual)
            if self._by_history:
                self._weights = usual
                self._excess.extend([self._beyond_due(own) for own in self._own])
        return None

    def _goes_on(self, excess: Sequence[float], cycle_s: float) -> Slow:
        rank = self._named
        assert rank is not None
        if median(each[rank] for each in self._excess) > _OVER * _SHARE * median(self._cycles):
            return Slow(rank, min(max(0.0, excess[rank]), cycle_s))
        self._named = None
        return Slow(rank, 0.0, f"rank {rank} is as fast as the others again")

    def _told(self, rank: int, excess_s: float, cycle_s: float, number: int) -> str:
        between_s = [median(each) for each in zip(*self._between, strict=True)]
        is_between = between_s[rank] - median([*between_s[:rank], *between_s[rank + 1 :]]) > excess_s / 2
        since = number + 1 - sum(step[rank] > excess_s / 2 for step in self._excess)
        where = (
            "between the steps: its data, or what its script alone does there"
            if is_between
            else "in its actions: its host or device is slow or shared, or the step function does more there"
        )
        return (
            f"rank {rank} keeps the others waiting since step {since}: {format_seconds(excess_s)} more than "
            f"its due, {min(1.0, excess_s / cycle_s):.0%} of a step, {where}"
        )

    def _paused(
        self, number: int, cycle_s: float, excess_s: float, slowest: int, held_up_s: Sequence[float]
    ) -> Slow | None:
        """A rank that was away once, for long."""
        held = max(range(len(held_up_s)), key=held_up_s.__getitem__)
        usual_s = median(self._cycles) if self._cycles else 0.0
        if sum(each > 0 for each in held_up_s) == 1 and held != self._named:
            rank, paused_s = held, max(held_up_s[held], excess_s if held == slowest else 0.0)
            why = "its process stood still: stopped, swapped out, or C code held the interpreter"
        elif (
            excess_s > _PAUSE_S
            and 0 < _PAUSE_TIMES * usual_s < cycle_s
            and cycle_s - excess_s < _REST_TIMES * usual_s  # the others were as fast as ever
            and slowest != self._named
        ):
            rank, paused_s, why = slowest, excess_s, "the others waited for it"
        else:
            return None
        share = f" ({paused_s / cycle_s:.0%} of it)" if paused_s <= cycle_s else ""
        told = f"rank {rank} paused for {format_seconds(paused_s)} about step {number}{share}: {why}"
        return Slow(rank, min(paused_s, cycle_s), told)

    def _told_of_pause(self, pause: Slow) -> Slow | None:
        """When it is over: what goes on is no pause."""
        self._pauses += 1
        return Slow(pause.rank, 0.0, pause.told) if self._pauses <= _MOST_PAUSES else None

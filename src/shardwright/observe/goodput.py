"""Where the time of a run has gone, over all of its lives: the productive share, and the rest by cause.

::

    launch      step 1      save            crash       step 5                    end
    │  start-up   │ steps  │ save │  steps │ start-up  │ steps, done again │ steps │
    └─ starts ────┴────────┴ saves┴────────┴─ starts ──┴── the first time they were lost

A step counts with what the script does until the next one. Of what was done after the last checkpoint before
a crash, nothing is left: it is lost. A step that a slow rank kept waiting counts without that wait. Time
between two launches by hand is nobody's.
"""

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardwright.errors import UsageError
from shardwright.observe.metrics import Metric, StepRecord, number_or_none
from shardwright.quantities import format_seconds

_EACH_S = 1.0
_REMEMBERED = 10_000
"""Steps that may turn out to be lost: saves are not further apart."""
_LONG_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Seconds of a run by what they went to, which add up to its time."""

    productive_s: float = 0.0
    starts_s: float = 0.0
    saves_s: float = 0.0
    waits_s: float = 0.0
    lost_s: float = 0.0
    lost_steps: int = 0
    restarts: int = 0

    @property
    def elapsed_s(self) -> float:
        return self.productive_s + self.starts_s + self.saves_s + self.waits_s + self.lost_s

    @property
    def share(self) -> float:
        """Productive, 0 to 1."""
        return self.productive_s / self.elapsed_s if self.elapsed_s else 0.0

    @classmethod
    def of_metrics(cls, steps: Sequence[Mapping[str, Any]], where: str = "") -> "Spent | None":
        """As the last of some lines that tell of it do; None where none does."""
        for step in reversed(steps):
            if Metric.ELAPSED in step:
                known = {name: number_or_none(step, metric, where) or 0 for name, metric in _METRICS.items()}
                counts = {name: int(known[name]) for name in ("lost_steps", "restarts")}
                return cls(**{**known, **counts})  # type: ignore[arg-type]
        return None

    def to_metrics(self) -> dict[str, float]:
        found = {str(metric): round(float(getattr(self, name)), 3) for name, metric in _METRICS.items()}
        return {Metric.PRODUCTIVE_SHARE: self.share, Metric.ELAPSED: self.elapsed_s, **found}

    def __str__(self) -> str:
        """In a line.

        >>> print(Spent(productive_s=90.0, starts_s=6.0, lost_s=4.0, lost_steps=3, restarts=1))
        productive 90% of 1m40s: starts 6.00 s, lost 4.00 s (3 steps, 1 restart)
        """
        parts = [
            f"{name} {format_seconds(seconds)}"
            for name, seconds in (
                ("starts", self.starts_s),
                ("saves", self.saves_s),
                ("waiting for slow ranks", self.waits_s),
            )
            if seconds >= _TOLD * self.elapsed_s
        ]
        if self.restarts:
            counts = f"{self.lost_steps} step{'s' * (self.lost_steps != 1)}, {self.restarts} restart"
            parts.append(f"lost {format_seconds(self.lost_s)} ({counts}{'s' * (self.restarts > 1)})")
        told = f": {', '.join(parts)}" if parts else ""
        return f"productive {self.share:.0%} of {format_seconds(self.elapsed_s)}{told}"


_TOLD = 0.005
_METRICS = {
    "productive_s": Metric.PRODUCTIVE,
    "starts_s": Metric.STARTS,
    "saves_s": Metric.SAVES,
    "waits_s": Metric.WAITS,
    "lost_s": Metric.LOST,
    "lost_steps": Metric.LOST_STEPS,
    "restarts": Metric.RESTARTS,
}


@dataclass(slots=True)
class Goodput:
    """Counts while a run goes on.

    Attributes:
        begun_s: when this life began, or the run was launched.
        before: the last lines of the metrics of lives before, if this life may go on from them.
    """

    begun_s: float
    before: Sequence[Mapping[str, Any]] = ()
    spent: Spent = Spent()
    _step: int = 0
    _last_s: float = 0.0
    _told_s: float = 0.0
    _saving_s: float = 0.0
    _save: int | None = None
    _kept: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))

    def event(self, kind: str, fields: Mapping[str, Any]) -> None:
        """Something happened: a save, perhaps. Steps wait while copies are made, or until it is done."""
        step, seconds = fields.get("step"), fields.get("seconds")
        if kind not in ("checkpoint_save_began", "checkpoint_saved") or not isinstance(seconds, float):
            return
        if kind == "checkpoint_save_began":
            self._save = step
        elif step == self._save:
            return  # it was written beside the steps
        self._saving_s += seconds

    def step_done(self, record: StepRecord, now_s: float) -> dict[str, float]:
        """Counts a step; returns metrics, of the run so far, now and then."""
        starts = not self._step or record.step <= self._step
        if not self._step:
            self._take_up(record.step)
        elif starts:  # ranks have formed anew
            self.spent = replace(self.spent, restarts=self.spent.restarts + 1)
        if record.step <= self._step:
            self._lose(self._step - record.step + 1)
        gap_s = max(0.0, now_s - self._last_s)
        self._step, self._last_s = record.step, now_s
        if starts:
            self.spent = replace(self.spent, starts_s=self.spent.starts_s + gap_s)
            self._kept.append(0.0)
        else:
            waits_s = min(record.slow_s or 0.0, gap_s)
            saves_s = min(self._saving_s, gap_s - waits_s)
            self._kept.append(gap_s - waits_s - saves_s)
            self.spent = replace(
                self.spent,
                productive_s=self.spent.productive_s + self._kept[-1],
                waits_s=self.spent.waits_s + waits_s,
                saves_s=self.spent.saves_s + saves_s,
            )
        self._saving_s = 0.0
        if not starts and now_s - self._told_s < _EACH_S:
            return {}
        self._told_s = now_s
        return self.spent.to_metrics()

    def _take_up(self, step: int) -> None:
        """Goes on from where the life before has ended."""
        self._last_s = self.begun_s
        lines = [each for each in self.before if _is_dated(each)]
        if not lines or (step == 1 and lines[-1][Metric.UNIX] < self.begun_s):
            return  # another run
        told_at = max((n for n, each in enumerate(lines) if Metric.ELAPSED in each), default=0)
        spent = Spent.of_metrics(lines) or Spent()
        gaps = [max(0.0, b[Metric.UNIX] - a[Metric.UNIX]) for a, b in itertools.pairwise(lines)]
        self._kept.extend(gaps)
        self.spent = replace(
            spent, productive_s=spent.productive_s + sum(gaps[told_at:]), restarts=spent.restarts + 1
        )
        self._step = int(lines[-1]["step"])
        self._last_s = max(self.begun_s, lines[-1][Metric.UNIX])

    def _lose(self, steps: int) -> None:
        lost_s = sum(self._kept.pop() for _ in range(min(steps, len(self._kept))))
        lost_s = min(lost_s, self.spent.productive_s)
        self.spent = replace(
            self.spent,
            productive_s=self.spent.productive_s - lost_s,
            lost_s=self.spent.lost_s + lost_s,
            lost_steps=self.spent.lost_steps + steps,
        )

    @property
    def is_worth_telling(self) -> bool:
        return self.spent.restarts > 0 or self.spent.elapsed_s >= _LONG_S


def _is_dated(line: Mapping[str, Any]) -> bool:
    try:
        return None not in (number_or_none(line, Metric.UNIX, ""), number_or_none(line, "step", ""))
    except UsageError:
        return False

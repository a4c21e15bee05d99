"""Two runs side by side: their figures, the parts of their steps, and what was different."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from shardwright.observe.console import format_loss, format_rate
from shardwright.observe.report.data import ReportData
from shardwright.observe.report.parts import StepPart
from shardwright.plan.diff import diff_plans
from shardwright.quantities import format_bytes, format_seconds

_ALIKE = 0.005
"""Steps whose seconds differ by less than this share are called equally fast."""

_SHORT = 20
"""Letters of a name that a column has room for."""

Unit = Literal["s", "1/s", "bytes", "share", "times", "steps", "loss"]


@dataclass(frozen=True, slots=True)
class ComparedRow:
    """One figure of both runs; None where it is not known.

    Attributes:
        unit: of the figures; a share is from 0 to 1.
    """

    name: str
    unit: Unit
    first: float | None
    second: float | None

    @property
    def change(self) -> float | None:
        """second / first - 1; of shares, second - first; None where one is not known, and of steps."""
        if self.first is None or self.second is None or self.unit == "steps":
            return None
        if self.unit == "share":
            return self.second - self.first
        return self.second / self.first - 1.0 if self.first else None

    def cells(self) -> list[str]:
        change = "-"
        if self.change is not None:
            percent = round(self.change * 100, 0 if self.unit == "share" else 1)
            points = "point" if abs(percent) == 1 else "points"
            change = f"{percent:+g}{f' {points}' if self.unit == 'share' else '%'}" if percent else "0"
        return [self.name, self._shown(self.first), self._shown(self.second), change]

    def _shown(self, value: float | None) -> str:
        if value is None:
            return "-"
        forms: dict[str, Callable[[float], str]] = {
            "s": format_seconds,
            "1/s": format_rate,
            "bytes": format_bytes,
            "loss": format_loss,
            "share": lambda share: f"{share * 100:.0f}%",
            "times": lambda times: f"{times:.2f}",
        }
        return forms[self.unit](value) if self.unit in forms else f"{value:g}"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that was different: its name, and what it was in the first and in the second run."""

    what: str
    first: str
    second: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two runs.

    Attributes:
        names: of the runs; told apart by a number where they are the same.
        parts: of their recorded steps: the first run in the place of the prediction.
        differences: of command, machine, versions, commit, settings and plan.
    """

    names: tuple[str, str]
    data: tuple[ReportData, ReportData]
    rows: tuple[ComparedRow, ...]
    parts: tuple[StepPart, ...]
    differences: tuple[Difference, ...]

    @property
    def labels(self) -> tuple[str, str]:
        """The names where they are short, as columns and curves are called; else ``first`` and ``second``."""
        return self.names if max(map(len, self.names)) <= _SHORT else ("first", "second")

    @property
    def verdict(self) -> str:
        """One sentence: which run is faster, and by how much."""
        first, second = (None if each.verdict is None else each.verdict.step_s for each in self.data)
        if not first or not second:
            return "One of the two has no step, so nothing can be said about their speed"
        models = {each.plan.model.fingerprint for each in self.data if each.plan is not None}
        if len(models) > 1:
            times = f"{format_seconds(first)} and {format_seconds(second)} a step"
            return f"They trained different models, so their speed does not compare: {times}"
        if abs(second / first - 1) < _ALIKE:
            return f"Both are equally fast: {format_seconds(first)} and {format_seconds(second)} a step"
        faster = int(second < first)
        fast_s, slow_s = sorted((first, second))
        fast, slow = self.labels[faster], self.labels[1 - faster]
        if self.labels != self.names:
            fast, slow = f"The {fast} run", f"the {slow}"
        ratio = f"{fast} is {slow_s / fast_s:.2f} times as fast as {slow}"
        return f"{ratio}: {format_seconds(fast_s)} against {format_seconds(slow_s)} a step"

    def to_dict(self) -> dict[str, Any]:
        return {
            "names": list(self.names),
            "verdict": self.verdict,
            "figures": [
                {"name": r.name, "unit": r.unit, "first": r.first, "second": r.second, "change": r.change}
                for r in self.rows
            ],
            "parts": [
                {"kind": part.kind, "first_s": part.predicted, "second_s": part.measured}
                for part in self.parts
            ],
            "differences": [asdict(each) for each in self.differences],
        }


def compare(first: ReportData, second: ReportData) -> Comparison:
    """Puts two runs, or plans, side by side."""
    same = first.name == second.name
    names = (f"{first.name} (1)", f"{second.name} (2)") if same else (first.name, second.name)
    return Comparison(
        names=names,
        data=(first, second),
        rows=tuple(row for row in _rows(first, second) if (row.first, row.second) != (None, None)),
        parts=_parts(first, second),
        differences=tuple(_differences(first, second)),
    )


def _rows(first: ReportData, second: ReportData) -> Iterator[ComparedRow]:
    both = (first, second)
    verdicts = [data.verdict for data in both]
    yield ComparedRow("step", "s", *(None if v is None or not v.measured else v.step_s for v in verdicts))
    yield ComparedRow("predicted step", "s", *(data.compared[0].predicted for data in both))
    units = [None if v is None or v.rate is None else v.rate_unit for v in verdicts]
    if units[0] == units[1] or None in units:
        unit = next(filter(None, units), "")
        yield ComparedRow(unit, "1/s", *(None if v is None else v.rate for v in verdicts))
    yield ComparedRow("times one process", "times", *(_figure(v.speed_up) if v else None for v in verdicts))
    yield ComparedRow("idle", "share", *(None if v is None else v.idle for v in verdicts))
    yield ComparedRow("optimizer's update", "s", *(data.compared[1].measured for data in both))
    yield ComparedRow("peak memory of a rank", "bytes", *(data.compared[2].measured for data in both))
    yield ComparedRow("steps", "steps", *(float(len(data.steps)) or None for data in both))
    losses = [_losses(data) for data in both]
    common = [step for step in losses[0] if step in losses[1]]
    if common:
        yield ComparedRow(f"loss at step {common[0]}", "loss", *(each[common[0]] for each in losses))
        if len(common) > 1:
            yield ComparedRow(f"loss at step {common[-1]}", "loss", *(each[common[-1]] for each in losses))


def _figure(value: float | None) -> float | None:
    return None if value is None else round(value, 2)


def _losses(data: ReportData) -> dict[int, float]:
    return {step.step: step.loss for step in data.steps if step.loss is not None}


def _parts(first: ReportData, second: ReportData) -> tuple[StepPart, ...]:
    """The measured parts of both; none where one has no recorded step."""
    measured = [{part.kind: part.measured for part in data.parts} for data in (first, second)]
    if not all(any(value is not None for value in each.values()) for each in measured):
        return ()
    return tuple(
        StepPart(part.kind, measured[0].get(part.kind), measured[1].get(part.kind)) for part in first.parts
    )


def _differences(first: ReportData, second: ReportData) -> Iterator[Difference]:
    facts = [data.facts for data in (first, second)]
    if facts[0] is not None and facts[1] is not None:
        for name in ("model", "command", "commit"):
            yield from _changed({name: getattr(facts[0], name)}, {name: getattr(facts[1], name)})
        yield from _changed(facts[0].machine, facts[1].machine)
        yield from _changed(facts[0].versions, facts[1].versions)
        yield from _changed(facts[0].settings, facts[1].settings, missing="default")
    if first.plan is not None and second.plan is not None:
        for change in diff_plans(first.plan, second.plan).decision:
            yield Difference(f"plan: {change.what}", change.before, change.after)


def _changed(
    first: Mapping[str, str], second: Mapping[str, str], *, missing: str = "-"
) -> Iterator[Difference]:
    for name in dict.fromkeys((*first, *second)):
        before, after = first.get(name) or missing, second.get(name) or missing
        if before != after:
            yield Difference(name, before, after)

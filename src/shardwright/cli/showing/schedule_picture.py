"""Draws a schedule for ``shardwright schedule show``."""

import math
from fractions import Fraction
from functools import reduce
from typing import Any

from shardwright.cluster import Link
from shardwright.quantities import format_seconds
from shardwright.schedule import Schedule, StageCost, bubble_seconds, peak_activations, simulate
from shardwright.schedule.actions import Action
from shardwright.schedule.schedule import draw_rows
from shardwright.text import align

__all__ = ["SchedulePicture"]

_LONGEST_CELL = 4
"""Units of the shortest action, where the picture is exact; else the shortest action is the unit."""


class SchedulePicture:
    """A schedule played out with equal stages.

    Args:
        schedule: without transfers.
        cost: of every stage; `saved_bytes` is 1, so that bytes count activations.
        send_s: seconds of a message between two ranks.
        active: the bound that the schedule was built with; the formulas do not know it.
    """

    def __init__(self, schedule: Schedule, cost: StageCost, *, send_s: float, active: int | None) -> None:
        self._schedule = schedule
        self._cost = cost
        self._send_s = send_s
        self._bounded = active is not None
        link = Link(latency_s=send_s, bandwidth_Bps=math.inf) if send_s else None
        self._simulation = simulate(
            schedule,
            (cost,) * schedule.num_stages,
            link=None if link is None else lambda source, target: link,
        )

    @property
    def _stages_per_rank(self) -> int:
        return self._schedule.num_stages // self._schedule.num_ranks

    @property
    def _work_s(self) -> float:
        """Seconds that each rank computes."""
        cost = self._cost
        return self._schedule.num_microbatches * self._stages_per_rank * (cost.forward_s + cost.backward_s)

    @property
    def _formula_s(self) -> float:
        """The bubble in closed form."""
        v, cost = self._stages_per_rank, self._cost
        return bubble_seconds(
            self._schedule.kind,
            num_ranks=self._schedule.num_ranks,
            forward_s=v * cost.forward_s,
            backward_s=v * cost.backward_s,
            weight_s=v * cost.weight_s,
            stages_per_rank=v,
        )

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for programs."""
        simulation, schedule = self._simulation, self._schedule
        return {
            "kind": schedule.kind,
            "ranks": schedule.num_ranks,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "stage_ranks": list(schedule.stage_ranks),
            "step_s": simulation.step_s,
            "bubble_s": simulation.step_s - self._work_s,
            "bubble_closed_form_s": self._formula_s,
            "bubble_share": simulation.bubble,
            "peak_activations": list(simulation.peak_bytes),
            "peak_activations_closed_form": self._formula_peaks(),
            "actions": [[str(action) for action in row] for row in schedule.actions],
            "events": [
                {"rank": e.rank, "action": str(e.action), "start_s": e.start_s, "end_s": e.end_s}
                for e in simulation.events
            ],
        }

    def text(self, *, width: int | None = None) -> str:
        """The picture, the bubble, and what each rank keeps."""
        schedule, simulation = self._schedule, self._simulation
        unit_s, is_exact = self._unit_s()
        v = self._stages_per_rank
        lines = [
            f"{schedule.kind}: {schedule.num_ranks} ranks, {v} stage{'s' if v > 1 else ''} on each, "
            f"{schedule.num_microbatches} microbatches; one column is {format_seconds(unit_s)}"
            + ("" if is_exact else ", times are rounded to it"),
            self._legend(),
            "",
            *_cut(self._chart(unit_s), width),
            "",
        ]
        bubble_s = simulation.step_s - self._work_s
        step_s = simulation.step_s
        lines.append(
            f"step    {format_seconds(step_s)}, of which each rank computes {format_seconds(self._work_s)}"
        )
        lines.append(
            f"bubble  {simulation.bubble:.1%} of the ranks' time ({format_seconds(bubble_s)} a rank), "
            "simulated"
        )
        formula_s = self._formula_s
        lines.append(
            f"        {formula_s / (self._work_s + formula_s):.1%} ({format_seconds(formula_s)} a rank), "
            "by the closed form" + self._why_different(bubble_s, formula_s)
        )
        return "\n".join([*lines, "", self._table()])

    def _why_different(self, bubble_s: float, formula_s: float) -> str:
        if math.isclose(bubble_s, formula_s, rel_tol=1e-6, abs_tol=1e-9 * self._work_s):
            return ""
        ranks, microbatches = self._schedule.num_ranks, self._schedule.num_microbatches
        reasons = []
        if self._send_s:
            reasons.append("free messages")
        if self._bounded:
            reasons.append("no --active")
        if self._schedule.kind == "zb_v":
            if not self._cost.forward_s == self._cost.backward_s / 2 == self._cost.weight_s:
                reasons.append("F = I = W")
            if microbatches < 2 * ranks - 1:
                reasons.append(f"at least {2 * ranks - 1} microbatches")
        elif microbatches < ranks:
            reasons.append(f"at least {ranks} microbatches")
        return f", which is for {', '.join(reasons)}" if reasons else ""

    def _legend(self) -> str:
        stage = "2F0 is the forward of stage 2" if self._stages_per_rank > 1 else "F0 is the forward"
        halves = " (or its halves I and W)" if self._schedule.splits_backward else ""
        return f"{stage} for microbatch 0, B the backward{halves}, . a column without work"

    def _unit_s(self) -> tuple[float, bool]:
        """Seconds of a column, and whether they divide all durations; where not, the picture is narrower."""
        simulation = self._simulation
        parts = {round(event.end_s - event.start_s, 9) for event in simulation.events}
        exact = reduce(_common, (Fraction(str(part)) for part in parts if part))
        shortest = min(parts)
        is_exact = shortest / float(exact) <= _LONGEST_CELL
        return (float(exact) if is_exact else shortest), is_exact

    def _chart(self, unit_s: float) -> str:
        rows: list[list[tuple[Action, int, int]]] = [[] for _ in range(self._schedule.num_ranks)]
        for event in self._simulation.events:
            # Not round(): it takes halves to the even number, so that an action could lose its column.
            start, end = (math.floor(time_s / unit_s + 0.5) for time_s in (event.start_s, event.end_s))
            rows[event.rank].append((event.action, start, end - start))
        return draw_rows(rows, name_stages=self._stages_per_rank > 1)

    def _table(self) -> str:
        rows = [["rank", "stages", "computes", "activations kept at once (simulated, closed form)"]]
        for rank, kept in enumerate(self._simulation.peak_bytes):
            stages = [str(s) for s, owner in enumerate(self._schedule.stage_ranks) if owner == rank]
            share = self._simulation.busy_s[rank] / self._simulation.step_s
            formula = self._formula_peaks()[rank]
            rows.append([str(rank), ", ".join(stages), f"{share:.1%}", f"{kept}, {formula}"])
        return align(rows)

    def _formula_peaks(self) -> list[int]:
        schedule = self._schedule
        return [
            peak_activations(
                schedule.kind,
                num_ranks=schedule.num_ranks,
                rank=rank,
                num_microbatches=schedule.num_microbatches,
                stages_per_rank=self._stages_per_rank,
            )
            for rank in range(schedule.num_ranks)
        ]


def _cut(chart: str, width: int | None) -> list[str]:
    """The lines of a picture, cut where they would wrap."""
    rows = chart.splitlines()
    longest = max(map(len, rows))
    if width is None or longest <= width:
        return rows
    cut = [row if len(row) <= width else row[: width - 1] + "…" for row in rows]
    return [*cut, f"(cut at {width} of {longest} characters; a pipe or a file gets them all)"]


def _common(a: Fraction, b: Fraction) -> Fraction:
    """The largest number that divides both."""
    denominator = math.lcm(a.denominator, b.denominator)
    return Fraction(math.gcd(int(a * denominator), int(b * denominator)), denominator)

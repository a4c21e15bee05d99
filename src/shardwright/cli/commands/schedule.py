"""``shardwright schedule``: draws pipeline schedules."""

import shutil
import sys
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import NUM_RANKS, AsJson, print_json, show_text
from shardwright.errors import UsageError
from shardwright.quantities import (
    MOST_MICROBATCHES,
    MOST_RANKS,
    MOST_STAGES_OF_RANK,
    format_seconds,
)
from shardwright.schedule import (
    KINDS,
    Schedule,
    StageCost,
    build_schedule,
    place_stages,
    simulate,
)
from shardwright.schedule.actions import Action
from shardwright.schedule.schedule import draw_rows
from shardwright.text import align

_MOST_ACTIONS = 200_000
_COST = StageCost(1.0, 2.0, 1.0, saved_bytes=1)

Kind = Annotated[str, typer.Argument(metavar="KIND", help=f"One of {', '.join(KINDS)}.")]
NumRanks = Annotated[int, typer.Option(*NUM_RANKS, min=1, max=MOST_RANKS, help="Pipeline ranks.")]
Microbatches = Annotated[
    int, typer.Option("--microbatches", "-m", min=1, max=MOST_MICROBATCHES, help="Parts of a batch.")
]
StagesPerRank = Annotated[
    int | None,
    typer.Option(
        "--stages-per-rank",
        min=1,
        max=MOST_STAGES_OF_RANK,
        help="Default: what the kind usually has, 1 or 2.",
    ),
]
Active = Annotated[
    int | None,
    typer.Option(
        "--active",
        min=1,
        max=MOST_MICROBATCHES,
        help="Most microbatches under way on a rank; default: the kind's own.",
    ),
]


def schedule(
    kind: Kind,
    num_ranks: NumRanks = 4,
    microbatches: Microbatches = 8,
    stages_per_rank: StagesPerRank = None,
    active: Active = None,
    as_json: AsJson = False,
) -> None:
    """Draw a pipeline schedule: who works when, the bubble, what each rank keeps.

    Stages are equal: a forward takes a second, a backward two (in halves: one each), messages none.

    For example: shardwright schedule zb_h1 -n 4 --microbatches 8
    """
    picture = _SchedulePicture(_build(kind, num_ranks, microbatches, stages_per_rank, active))
    if as_json:
        print_json(picture.to_dict())
    else:
        show_text(picture.text(width=shutil.get_terminal_size().columns if sys.stdout.isatty() else None))


def _check_length(stages: int, microbatches: int) -> None:
    actions = 2 * stages * microbatches
    if actions > _MOST_ACTIONS:
        raise UsageError(
            f"{microbatches} microbatches on {stages} stages are {actions} actions or more, which nobody can "
            f"look at. Take at most {_MOST_ACTIONS}."
        )


def _build(
    kind: str,
    num_ranks: int,
    microbatches: int,
    stages_per_rank: int | None,
    active: int | None,
) -> Schedule:
    kind = kind.lower().replace("-", "_")
    if stages_per_rank not in (None, 1) and kind in ("gpipe", "1f1b", "zb_h1"):
        raise UsageError(
            f"--stages-per-rank is {stages_per_rank}, but {kind} runs one stage on each rank. "
            "Leave it out, or ask for interleaved_1f1b."
        )
    _check_length(num_ranks * (stages_per_rank or 1), microbatches)
    stage_ranks = place_stages(kind, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    return build_schedule(
        kind,
        stage_ranks=stage_ranks,
        num_microbatches=microbatches,
        active_microbatches=active,
        costs=(_COST,) * len(stage_ranks),
    )


class _SchedulePicture:
    """A schedule played out with equal stages."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self._simulation = simulate(schedule, (_COST,) * schedule.num_stages)

    @property
    def _stages_per_rank(self) -> int:
        return self._schedule.num_stages // self._schedule.num_ranks

    @property
    def _work_s(self) -> float:
        """Seconds that each rank computes."""
        return self._schedule.num_microbatches * self._stages_per_rank * (_COST.forward_s + _COST.backward_s)

    def to_dict(self) -> dict[str, Any]:
        simulation, schedule = self._simulation, self._schedule
        return {
            "kind": schedule.kind,
            "ranks": schedule.num_ranks,
            "stages": schedule.num_stages,
            "microbatches": schedule.num_microbatches,
            "stage_ranks": list(schedule.stage_ranks),
            "step_s": simulation.step_s,
            "bubble_s": simulation.step_s - self._work_s,
            "bubble_share": simulation.bubble,
            "peak_activations": list(simulation.peak_bytes),
            "actions": [[str(action) for action in row] for row in schedule.actions],
            "events": [
                {"rank": e.rank, "action": str(e.action), "start_s": e.start_s, "end_s": e.end_s}
                for e in simulation.events
            ],
        }

    def text(self, *, width: int | None = None) -> str:
        """The picture, the bubble, and what each rank keeps."""
        schedule, simulation = self._schedule, self._simulation
        v = self._stages_per_rank
        lines = [
            f"{schedule.kind}: {schedule.num_ranks} ranks, {v} stage{'s' if v > 1 else ''} on each, "
            f"{schedule.num_microbatches} microbatches; one column is {format_seconds(1.0)}",
            self._legend(),
            "",
            *_cut(self._chart(), width),
            "",
        ]
        bubble_s = simulation.step_s - self._work_s
        step_s = simulation.step_s
        lines.append(
            f"step    {format_seconds(step_s)}, of which each rank computes {format_seconds(self._work_s)}"
        )
        lines.append(
            f"bubble  {simulation.bubble:.1%} of the ranks' time ({format_seconds(bubble_s)} a rank)"
        )
        return "\n".join([*lines, "", self._table()])

    def _legend(self) -> str:
        stage = "2F0 is the forward of stage 2" if self._stages_per_rank > 1 else "F0 is the forward"
        halves = " (or its halves I and W)" if self._schedule.splits_backward else ""
        return f"{stage} for microbatch 0, B the backward{halves}, . a column without work"

    def _chart(self) -> str:
        rows: list[list[tuple[Action, int, int]]] = [[] for _ in range(self._schedule.num_ranks)]
        for event in self._simulation.events:
            start, end = round(event.start_s), round(event.end_s)
            rows[event.rank].append((event.action, start, end - start))
        return draw_rows(rows, name_stages=self._stages_per_rank > 1)

    def _table(self) -> str:
        rows = [["rank", "stages", "computes", "activations kept at once"]]
        for rank, kept in enumerate(self._simulation.peak_bytes):
            stages = [str(s) for s, owner in enumerate(self._schedule.stage_ranks) if owner == rank]
            share = self._simulation.busy_s[rank] / self._simulation.step_s
            rows.append([str(rank), ", ".join(stages), f"{share:.1%}", str(kept)])
        return align(rows)


def _cut(chart: str, width: int | None) -> list[str]:
    """The lines of a picture, cut where they would wrap."""
    rows = chart.splitlines()
    longest = max(map(len, rows))
    if width is None or longest <= width:
        return rows
    cut = [row if len(row) <= width else row[: width - 1] + "…" for row in rows]
    return [*cut, f"(cut at {width} of {longest} characters; a pipe or a file gets them all)"]

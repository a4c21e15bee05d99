"""``shardwright simulate``: replays a plan under other conditions."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.cli.asking.run_path import run_path
from shardwright.errors import UsageError
from shardwright.files import replace_file
from shardwright.limits import MOST_MICROBATCHES, MOST_RANKS
from shardwright.observe.chrome_trace import chrome_trace
from shardwright.observe.timeline import MeasuredEvent
from shardwright.plan import Plan
from shardwright.planner.explain.plan_replay import Change, Replay, base_setting, change_setting, play
from shardwright.printable import printable
from shardwright.quantities import format_bytes, format_seconds
from shardwright.schedule import KINDS
from shardwright.text_table import align

__all__ = ["simulate"]

_MOST_ROWS = 32

PlanFile = Annotated[
    Path,
    typer.Argument(metavar="PLAN", callback=run_path, help="A plan file, or a run, by name or folder."),
]
Microbatches = Annotated[
    int | None,
    typer.Option("--microbatches", "-m", min=1, max=MOST_MICROBATCHES, help="Parts of the same batch."),
]
ScheduleName = Annotated[
    str | None, typer.Option("--schedule", metavar="NAME", help=f"One of {', '.join(KINDS)}.")
]
Slow = Annotated[
    list[str] | None,
    typer.Option(
        "--slow",
        metavar="RANK=FACTOR",
        help="Actions of a pipeline rank take FACTOR as long; may be repeated.",
    ),
]
Bandwidth = Annotated[
    float, typer.Option("--bandwidth", metavar="FACTOR", help="All links with FACTOR the bandwidth.")
]
Latency = Annotated[
    float, typer.Option("--latency", metavar="FACTOR", help="All links with FACTOR the latency.")
]
TraceFile = Annotated[
    Path | None, typer.Option("--trace", metavar="FILE.json", help="Write the timeline, for Perfetto.")
]


def simulate(
    plan: PlanFile,
    microbatches: Microbatches = None,
    schedule: ScheduleName = None,
    slow: Slow = None,
    bandwidth: Bandwidth = 1.0,
    latency: Latency = 1.0,
    trace: TraceFile = None,
    as_json: AsJson = False,
) -> None:
    """Play a plan out with a slow rank, other links, microbatches or another schedule, beside the plan's own.

    For example: shardwright simulate gpt.json --slow 1=1.5 --latency 10 --trace slow.json
    """
    found = Plan.read(plan / "plan.json" if plan.is_dir() else plan)
    change = Change(
        num_microbatches=microbatches,
        kind=None if schedule is None else schedule.lower().replace("-", "_"),
        slow=_factors(slow or ()),
        bandwidth=bandwidth,
        latency=latency,
    )
    before, after = play(base_setting(found)), play(change_setting(found, change))
    if trace is not None:
        _write_trace(trace, after)
    if as_json:
        print_json({"change": asdict(change), "planned": _document(before), "changed": _document(after)})
    else:
        show_text(_text(found, before, after))


def _rank(text: str) -> int:
    if not text.strip().isdecimal() or len(text) > len(str(MOST_RANKS)):
        raise ValueError
    return int(text)


def _factors(words: Sequence[str]) -> dict[int, float]:
    """``["1=1.5"]`` as ``{1: 1.5}``."""
    found = {}
    for word in words:
        rank, _, factor = word.partition("=")
        try:
            found[_rank(rank)] = float(factor)
        except ValueError as error:
            raise UsageError(
                f"--slow {printable(word[:80])}: it must be a pipeline rank and a factor, for example --slow "
                "1=1.5 for a rank 1 whose work takes half as long again."
            ) from error
    return found


def _write_trace(file: Path, replay: Replay) -> None:
    events = [MeasuredEvent(*event) for event in replay.simulation.events]
    saved_bytes = [cost.saved_bytes for cost in replay.setting.costs]
    document = chrome_trace(events, saved_bytes=saved_bytes, lane="simulated", info={"step_s": replay.step_s})
    try:
        replace_file(file, json.dumps(document) + "\n")
    except OSError as error:
        raise UsageError(
            f"{file} cannot be written: {error.strerror}. Name a file in a folder of yours."
        ) from error
    say(f"wrote {file}: open it at https://ui.perfetto.dev")


def _document(replay: Replay) -> dict[str, Any]:
    simulation, schedule = replay.simulation, replay.setting.schedule
    return {
        "schedule": schedule.kind,
        "microbatches": schedule.num_microbatches,
        "step_s": replay.step_s,
        "schedule_s": simulation.step_s,
        "bubble": simulation.bubble,
        "busy_s": list(simulation.busy_s),
        "idle_s": list(replay.idle_s),
        "peak_activation_bytes": list(simulation.peak_bytes),
    }


def _text(plan: Plan, before: Replay, after: Replay) -> str:
    assert plan.prediction is not None
    rows = [["", "as planned", "simulated", "change"]]
    rows.append(["schedule", *(_shape(replay) for replay in (before, after)), ""])
    rows.append(_row("step", before.step_s, after.step_s))
    rows.append(_row("of it the schedule", before.simulation.step_s, after.simulation.step_s))
    bubbles = [replay.simulation.bubble for replay in (before, after)]
    rows.append(["bubble", *(f"{share:.1%}" for share in bubbles), ""])
    peaks = [max(replay.simulation.peak_bytes) for replay in (before, after)]
    rows.append(["most activations of a rank", *(format_bytes(peak) for peak in peaks), ""])
    lines = [align(rows)]
    stated_s = plan.prediction.step_s
    if abs(stated_s - before.step_s) > 1e-6 * stated_s:
        lines.append(
            f"The plan itself predicts {format_seconds(stated_s)}: it was edited, or does not keep its links."
        )
    if after.setting.schedule.num_microbatches != before.setting.schedule.num_microbatches:
        lines.append("Seconds and bytes of a microbatch are taken to be in proportion to its size.")
    return "\n".join([*lines, "", _ranks(before, after)])


def _shape(replay: Replay) -> str:
    schedule = replay.setting.schedule
    return f"{schedule.kind}, {schedule.num_microbatches} microbatches"


def _row(name: str, before_s: float, after_s: float) -> list[str]:
    change = f"{after_s / before_s - 1:+.1%}" if before_s else ""
    return [name, format_seconds(before_s), format_seconds(after_s), change]


def _ranks(before: Replay, after: Replay) -> str:
    rows = [["rank", "computes", "idle", "idle as planned", "activations at most", "as planned"]]
    for rank, (idle_s, planned_s) in enumerate(zip(after.idle_s, before.idle_s, strict=True)):
        rows.append(
            [
                str(rank),
                format_seconds(after.simulation.busy_s[rank]),
                format_seconds(idle_s),
                format_seconds(planned_s),
                format_bytes(after.simulation.peak_bytes[rank]),
                format_bytes(before.simulation.peak_bytes[rank]),
            ]
        )
    if len(rows) <= _MOST_ROWS + 1:
        return align(rows)
    by_idle = sorted(rows[1:], key=lambda row: -after.idle_s[int(row[0])])
    shown = sorted(by_idle[: _MOST_ROWS // 2] + by_idle[-_MOST_ROWS // 2 :], key=lambda row: int(row[0]))
    left = len(rows) - 1 - len(shown)
    return f"{align([rows[0], *shown])}\n{left} ranks between the idlest and the busiest: --json has all"

"""``shardwright explain``: explains a plan, or plays it out under other conditions."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.cli.asking.application import AsJson, print_json, say, show_text
from shardwright.cli.asking.run_path import read_plan, run_path
from shardwright.cli.asking.settings import named_values, number_of
from shardwright.errors import UsageError
from shardwright.files import replace_file
from shardwright.observe.plan_text import MEMORY_COLUMNS, format_plan, memory_cells
from shardwright.observe.report.data import Predicted, ReportData, gather
from shardwright.observe.report.parts import Compared
from shardwright.observe.timeline import MeasuredEvent, chrome_trace
from shardwright.plan import Alternative, Plan
from shardwright.planner.replay import (
    Change,
    Replay,
    Sensitivity,
    base_setting,
    change_setting,
    play,
    sensitivities,
)
from shardwright.quantities import MOST_MICROBATCHES, MOST_RANKS, format_bytes, format_seconds
from shardwright.text import align

_BAR = 30


def format_explanation(data: ReportData) -> str:
    """The explanation of a run or plan; unknown values are left out, and `data.notes` say why."""
    blocks = []
    if data.plan is not None:
        blocks.append(format_plan(data.plan))
    blocks += _measured(data)
    if data.predicted is not None and data.plan is not None:
        blocks.append(_block("what the step is spent on", _waterfall(data.predicted)))
        if data.predicted.stack:
            blocks.append(_block("memory at the peak of each rank", _memory(data.predicted)))
        blocks.append(_block("what would change it", _sensitivities(sensitivities(data.plan))))
    if data.plan is not None and data.plan.alternatives:
        blocks.append(_block("runners-up", _alternatives(data.plan.alternatives)))
    return "\n\n".join([*blocks, *data.notes])


def explanation_document(data: ReportData) -> dict[str, Any]:
    """The same for programs: the data of the report without timelines, with the sensitivities."""
    document = data.to_dict()
    for name in ("measured_timeline", "steps"):
        document.pop(name)
    if document["predicted"] is not None:
        for name in ("timeline", "memory_over_time"):
            document["predicted"].pop(name)
    document["sensitivities"] = []
    if data.plan is not None and data.predicted is not None:
        document["sensitivities"] = [
            {"name": s.name, "step_s": s.step_s, "saved_s": s.saved_s, "assumption": s.assumption}
            for s in sensitivities(data.plan)
        ]
    return document


def _measured(data: ReportData) -> Iterator[str]:
    rows = [row for row in (*data.compared, *data.spent) if row.measured is not None]
    if rows:
        header = ["", "predicted", "measured", "above prediction"]
        table = align([header, *(_compared_row(row) for row in rows)])
        yield _block("predicted beside measured (parts of a step: mean of the ranks)", table)


def _compared_row(row: Compared) -> list[str]:
    form = format_seconds if row.name.endswith("(s)") else format_bytes
    shown = ["-" if value is None else form(value) for value in (row.predicted, row.measured)]
    above = row.remark or ("-" if row.above is None else f"{row.above:+.1%}")
    return [row.name.rsplit(" (", 1)[0], *shown, above]


def _waterfall(predicted: Predicted) -> str:
    step_s = predicted.waterfall.step_s
    rows = []
    for part in predicted.waterfall.parts:
        share = part.seconds / step_s if step_s else 0.0
        # At least one mark: a part that is listed is there.
        bar = "█" * max(1, round(abs(share) * _BAR))
        rows.append([part.name, format_seconds(part.seconds), f"{share:.1%}", bar])
    rows.append(["predicted step", format_seconds(step_s), "100.0%", "without the optimizer's update"])
    if predicted.update_s:
        rows.append(["optimizer's update", format_seconds(predicted.update_s), "", "after the step"])
    return align(rows)


def _memory(predicted: Predicted) -> str:
    """A row for each run of ranks that are alike."""
    rows = [["ranks", *MEMORY_COLUMNS]]
    numbered = enumerate(predicted.stack)
    for memory, group in groupby(numbered, key=lambda pair: pair[1]):
        ranks = [rank for rank, _ in group]
        name = str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
        rows.append([name, *memory_cells(memory)])
    limit = f"limit {format_bytes(predicted.limit_bytes)}" if predicted.limit_bytes else "no limit is known"
    return f"{align(rows)}\n{limit}"


def _sensitivities(found: Sequence[Sensitivity]) -> str:
    rows = [["as planned", format_seconds(found[0].step_s + found[0].saved_s), "", ""]]
    for row in found:
        before_s = row.step_s + row.saved_s
        change = row.step_s / before_s - 1 if before_s else 0.0
        note = f"assuming {row.assumption}" if row.assumption else ""
        shown = f"{change:+.1%}" if abs(change) >= 5e-4 else "0%"
        rows.append([row.name, format_seconds(row.step_s), shown, note])
    return align(rows)


def _alternatives(found: Sequence[Alternative]) -> str:
    rows = [["schedule", "microbatches", "stages", "step", "verdict"]]
    for a in found:
        rows.append([a.schedule, str(a.microbatches), str(a.stages), format_seconds(a.step_s), a.verdict])
    return align(rows)


def _block(title: str, text: str) -> str:
    return "\n".join([title, *_indented(text.splitlines())])


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


_MOST_ROWS = 32
_CHANGES = ("microbatches", "schedule", "slow", "bandwidth", "latency")


def explain(
    plan_or_run: Annotated[
        Path,
        typer.Argument(
            metavar="PLAN_OR_RUN", callback=run_path, help="A plan file, or a run, by name or folder."
        ),
    ],
    what_if: Annotated[
        list[str] | None,
        typer.Option(
            "--what-if",
            metavar="NAME=VALUE",
            help="Play the plan out otherwise: with these microbatches, another schedule, pipeline rank 1 so "
            "many times as slow (slow1=1.5), all links so many times the bandwidth or latency.",
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option("--trace", metavar="FILE.json", help="Write the played timeline, for Perfetto."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say why this plan, what its step is spent on, where memory goes, and what would make it faster.

    For example: shardwright explain runs/2026-11-20_12-58-37

    shardwright explain gpt.json --what-if slow1=1.5 --what-if latency=10 --trace slow.json
    """
    if what_if or trace is not None:
        _play_out(read_plan(plan_or_run), what_if or (), trace, as_json=as_json)
        return
    data = gather(plan_or_run)
    if as_json:
        print_json(explanation_document(data))
    else:
        show_text(format_explanation(data))


def _play_out(plan: Plan, words: Sequence[str], trace: Path | None, *, as_json: bool) -> None:
    change = _change(words)
    before, after = play(base_setting(plan)), play(change_setting(plan, change))
    if trace is not None:
        _write_trace(trace, after)
    if as_json:
        print_json({"change": asdict(change), "planned": _document(before), "changed": _document(after)})
    else:
        show_text(_text(plan, before, after))


def _change(words: Sequence[str]) -> Change:
    given = named_values(words, option="--what-if", names=_CHANGES)
    slow = {name: text for name, text in given.items() if name.startswith("slow")}
    for name in slow:
        if not 0 < len(name) - len("slow") <= len(str(MOST_RANKS)):
            raise UsageError(f"{name[:40]} must end with the number of a pipeline rank: slow1=1.5")
    kind, microbatches = given.get("schedule"), given.get("microbatches")
    count = None if microbatches is None else number_of("microbatches", microbatches, int)
    if count is not None and count > MOST_MICROBATCHES:
        raise UsageError(f"microbatches is {count}, but it must be at most {MOST_MICROBATCHES}.")
    return Change(
        num_microbatches=count,
        kind=None if kind is None else kind.lower().replace("-", "_"),
        slow={int(name.removeprefix("slow")): number_of(name, text) for name, text in slow.items()},
        bandwidth=number_of("bandwidth", given.get("bandwidth", "1")),
        latency=number_of("latency", given.get("latency", "1")),
    )


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

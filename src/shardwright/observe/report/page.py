"""The HTML page of a report: one file, with no network requests.

Text from files is escaped; the plots' data is in a JSON block without any ``<``. A content security policy
forbids the page to load anything, and to run scripts other than its own.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from shardwright import __version__
from shardwright.observe.report.charts import PART_COLORS, charts
from shardwright.observe.report.data import Compared, ReportData
from shardwright.observe.report.html import escape
from shardwright.plan import Plan
from shardwright.quantities import format_bytes, format_count, format_seconds

__all__ = ["render_page"]


def render_page(data: ReportData, *, library: str) -> str:
    """The page.

    Args:
        data: what it shows.
        library: plotly.js, compressed with gzip, in base64.
    """
    figures = json.dumps(charts(data), allow_nan=False).replace("<", "\\u003c")
    nonce = hashlib.sha256(figures.encode()).hexdigest()[:32]
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(
        section
        for section in (
            _head(data),
            _timeline(data),
            _memory(data),
            _waterfall(data),
            _alternatives(data.plan),
            _reasons(data.plan),
            _stages(data),
            _metrics(data),
        )
        if section
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(data.name)} - Shardwright</title>
<style>{_asset("page.css")}</style>
</head>
<body>
{body}
<p class="soft">Written by Shardwright {escape(__version__)}.</p>
<script type="application/json" id="figures">{figures}</script>
<script type="text/plain" id="nonce">{nonce}</script>
<script type="text/plain" id="library">{library}</script>
<script nonce="{nonce}">{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return files("shardwright.observe.report").joinpath(name).read_text(encoding="utf-8")


def _head(data: ReportData) -> str:
    lines = [f"<h1>{escape(data.name)}</h1>"]
    if data.plan is not None:
        lines += [f"<p>{escape(line)}</p>" for line in _what_ran(data.plan)]
    if data.steps:
        count = len(data.steps)
        lines.append(
            f"<p>{count} step{'s' * (count != 1)} done, the last is number {data.steps[-1].step}.</p>"
        )
    lines += [f'<p class="note">{escape(note)}</p>' for note in data.notes]
    keyed = zip(data.compared, ("step", "update", "memory"), strict=True)
    known = [(row, key) for row, key in keyed if key != "update" or row.predicted or row.measured]
    cards = "".join(_card(row, key) for row, key in known)
    lines.append(f'<div class="cards">{cards}</div>')
    return "\n".join(lines)


def _what_ran(plan: Plan) -> Sequence[str]:
    mesh, schedule = plan.mesh, plan.schedule
    degrees = f"pipeline {mesh.pipeline} x data {mesh.data}{mesh.shared_title}"
    if mesh.shard > 1:
        degrees += f", each {mesh.shard} replicas share parameters"
    conditions = plan.prediction.conditions if plan.prediction is not None else None
    lines = [
        f"Model {plan.model.fingerprint}: {format_count(plan.model.num_parameters)} parameters, "
        f"{len(plan.model.units)} units.",
        f"{mesh.world_size} rank{'s' * (mesh.world_size != 1)} ({degrees}, placement "
        f"{mesh.placement_strategy}); {schedule.kind}, {schedule.microbatches} microbatches, "
        f"{len(plan.stages)} stages.",
    ]
    if conditions is not None:
        hosts = len(set(conditions.hosts))
        cores = f", {conditions.cores} cores for a replica" if conditions.cores else ""
        lines.append(f"A replica spans {hosts} host{'s' * (hosts != 1)}{cores}.")
    return lines


def _card(row: Compared, key: str) -> str:
    form = format_bytes if key == "memory" else format_seconds
    shown = {
        part: "unknown" if value is None else form(value)
        for part, value in (("predicted", row.predicted), ("measured", row.measured))
    }
    error = "" if row.error is None else f'<span class="soft">prediction {row.error:+.1%}</span>'
    if row.remark:
        error = f'<span class="soft">{escape(row.remark)}</span>'
    figures = "".join(
        f'{part} <b data-figure="{key}_{part}" data-value="{value!r}">{shown[part]}</b>'
        for part, value in (("predicted", row.predicted), ("measured", row.measured))
    )
    title = {"step": "Step time", "update": "Optimizer's update", "memory": "Peak memory of a rank"}[key]
    return f'<div class="card"><span class="soft">{title}</span><br>{figures}{error}</div>'


def _plot(data: ReportData, name: str, *, label: str) -> str:
    figure = charts(data).get(name)
    if figure is None:
        return ""
    return (
        f'<div class="plot" id="plot-{name}" role="img" aria-label="{escape(label)}" '
        f'style="height:{figure["height"]}px"></div>'
    )


def _timeline(data: ReportData) -> str:
    plot = _plot(data, "timeline", label="Timeline of the pipeline, predicted above measured")
    if not plot:
        return ""
    lines = ["<h2>Timeline of a step</h2>"]
    if len(data.ranks) < data.num_ranks:
        lines.append(
            f'<p class="soft">{len(data.ranks)} of {data.num_ranks} pipeline ranks are shown, among them '
            "those with most work and most memory.</p>"
        )
    if data.timeline is not None and data.timeline.step is not None:
        lines.append(f'<p class="soft">Measured in step {data.timeline.step}.</p>')
    if data.trace_file is not None:
        name = escape(data.trace_file)
        lines.append(f'<p><a href="{name}">{name}</a> has all of it: open it at ui.perfetto.dev.</p>')
    lines.append('<p class="soft">Drag across the plot to zoom in, click twice to zoom out.</p>')
    if any(row.measured is not None for row in data.spent):
        rows = [
            [escape(row.name.removesuffix(" (s)")), *map(_seconds, (row.predicted, row.measured))]
            for row in data.spent
        ]
        plot += "\n<p>Mean of all ranks:</p>\n" + _table(["", "predicted", "measured"], rows)
    return "\n".join([*lines, plot])


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else format_seconds(value)


def _measured_memory(data: ReportData) -> list[str]:
    if data.timeline is None or not data.timeline.memory:
        return []
    return [
        "<p>Dotted: measured at the end of every action; on GPUs what tensors take, on CPUs all that the "
        "process has of its heap, libraries included.</p>"
    ]


def _memory(data: ReportData) -> str:
    over_time = _plot(data, "memory", label="Memory of each rank over a step")
    stack = _plot(data, "stack", label="Memory of each rank at its peak")
    if not over_time and not stack:
        return ""
    lines = ["<h2>Memory</h2>"]
    limit_bytes = data.predicted.limit_bytes if data.predicted is not None else 0
    limit = format_bytes(limit_bytes) if limit_bytes else "not known"
    lines.append(f'<p>Limit of a rank: <b data-figure="limit" data-value="{limit_bytes!r}">{limit}</b>.</p>')
    if over_time:
        lines += [
            "<p>Predicted, over a step: parameters, gradients, optimizer state and batch, and above them "
            "what is kept for backwards. Temporaries come on top; they are in the next plot.</p>",
            *_measured_memory(data),
            over_time,
        ]
    if stack:
        lines += ["<p>At the peak of each rank:</p>", stack]
    if data.peak_by_rank:
        lines.append(
            '<p class="soft">Measured: what the device allocated, or on CPUs the whole process, the '
            "interpreter and its libraries included.</p>"
        )
    return "\n".join(lines)


def _waterfall(data: ReportData) -> str:
    if data.predicted is None:
        return ""
    waterfall = data.predicted.waterfall
    rows = [
        [
            f'<span class="bar" style="background:{PART_COLORS[part.kind]}"></span> {escape(part.name)}',
            f'<span data-part="{escape(part.name)}" data-value="{part.seconds!r}">'
            f"{format_seconds(part.seconds)}</span>",
            f"{part.seconds / waterfall.step_s:.1%}" if waterfall.step_s else "",
            escape(part.meaning),
        ]
        for part in waterfall.parts
    ]
    rows.append(["<b>predicted step</b>", format_seconds(waterfall.step_s), "100.0%", _WITHOUT_OPTIMIZER])
    if data.predicted.update_s:
        rows.append(["optimizer's update", format_seconds(data.predicted.update_s), "", _UPDATE])
    return "\n".join(
        [
            "<h2>What the step is spent on</h2>",
            _plot(data, "waterfall", label="Parts of the predicted step"),
            _table(["part", "time", "share", "what it is"], rows, wraps=3),
        ]
    )


_WITHOUT_OPTIMIZER = "The optimizer's update is not part of it."
_UPDATE = "After the step, on the rank that has most to update."


def _alternatives(plan: Plan | None) -> str:
    if plan is None or not plan.alternatives:
        return ""
    rows = [
        [
            escape(a.schedule),
            str(a.microbatches),
            str(a.stages),
            format_seconds(a.step_s),
            format_bytes(a.peak_bytes),
            escape(a.verdict),
        ]
        for a in plan.alternatives
    ]
    header = ["schedule", "microbatches", "stages", "step", "peak memory", "verdict"]
    return "<h2>Runners-up</h2>\n" + _table(header, rows, wraps=5)


def _reasons(plan: Plan | None) -> str:
    if plan is None or not plan.why:
        return ""
    return "<h2>Why this plan</h2>\n<ul>" + "".join(f"<li>{escape(why)}</li>" for why in plan.why) + "</ul>"


def _stages(data: ReportData) -> str:
    plan, measured = data.plan, data.stage_seconds
    if plan is None:
        return ""
    rows, offloads = [], any(stage.offload for stage in plan.stages)
    for index, stage in enumerate(plan.stages):
        cost = plan.prediction.stages[index] if plan.prediction is not None else None
        ends = " .. ".join(dict.fromkeys((stage.units[0], stage.units[-1]))) if stage.units else "-"
        row = [str(index), str(stage.rank), str(len(stage.units)), escape(ends), str(len(stage.recompute))]
        if offloads:
            row.append(str(len(stage.offload)))
        if cost is not None:
            row += [
                *_beside(cost.forward_s, measured.get(index, (None, None))[0], measured),
                *_beside(cost.backward_s, measured.get(index, (None, None))[1], measured),
                format_bytes(cost.parameter_bytes),
                format_bytes(cost.saved_bytes),
                format_bytes(cost.send_bytes),
            ]
        rows.append(row)
    header = ["stage", "rank", "units", "first .. last", "recomputed", *(["offloaded"] if offloads else [])]
    if plan.prediction is not None:
        header += [*_beside_header("forward", measured), *_beside_header("backward", measured)]
        header += ["parameters", "kept", "sends"]
    note = '<p class="soft">Times, bytes kept and bytes sent are for one microbatch, and predicted'
    note += "; measured are the means of the step in the timeline.</p>" if measured else ".</p>"
    shown = _table(header, rows[:_MOST_ROWS])
    if len(rows) > _MOST_ROWS:
        shown += f'<p class="soft">{len(rows) - _MOST_ROWS} more stages: shardwright plan show has all.</p>'
    return f"<h2>Stages</h2>\n{note if plan.prediction else ''}{shown}"


def _beside(predicted_s: float, measured_s: float | None, shown: Mapping[int, Any]) -> list[str]:
    """A predicted time, and the measured one where there are any."""
    return [format_seconds(predicted_s), _seconds(measured_s)] if shown else [format_seconds(predicted_s)]


def _beside_header(name: str, shown: Mapping[int, Any]) -> list[str]:
    return [name, f"{name}, measured"] if shown else [name]


_MOST_ROWS = 128


def _metrics(data: ReportData) -> str:
    loss = _plot(data, "loss", label="Loss over the steps")
    steps = _plot(data, "steps", label="Seconds of each step")
    first_s = data.steps[0].step_s if len(data.steps) > 1 else None
    note = ""
    if first_s is not None:
        note = (
            f'<p class="soft">Without the first step, {format_seconds(first_s)}, which traces and plans.</p>'
        )
    return f"<h2>Over the run</h2>\n{loss}\n{note}\n{steps}" if loss or steps else ""


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], *, wraps: int | None = None) -> str:
    """A table of cells that are HTML; the column `wraps` may break its lines."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(
        "<tr>"
        + "".join(
            f'<td class="wrap">{cell}</td>' if index == wraps else f"<td>{cell}</td>"
            for index, cell in enumerate(row)
        )
        + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

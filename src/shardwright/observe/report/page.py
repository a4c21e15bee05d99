"""The HTML page of a report: one file with no network requests, its head, and the file on disk.

Text from files is escaped; the plots' data is in a JSON block without any ``<``. A content security policy
forbids the page to load anything, and to run scripts other than its own.
"""

import base64
import gzip
import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from shardwright import __version__
from shardwright.errors import UsageError
from shardwright.files import replace_file
from shardwright.observe.console import format_loss
from shardwright.observe.report.charts import charts
from shardwright.observe.report.data import ReportData, gather
from shardwright.observe.report.parts import Compared
from shardwright.observe.report.sections import (
    alternatives,
    difference,
    memory,
    metrics,
    parts,
    reasons,
    stage_map,
    stage_table,
    timeline,
)
from shardwright.observe.report.timeline_chart import Figure, escape
from shardwright.observe.report.verdict import Verdict
from shardwright.plan import Plan
from shardwright.quantities import counted, format_bytes, format_parameters, format_seconds
from shardwright.text import printable

_WIDTH, _HEIGHT, _MOST_POINTS = 240, 44, 200


def head(data: ReportData) -> str:
    """Name, verdict, sparkline, notes and figures."""
    lines = [f"<h1>{escape(data.name)}</h1>"]
    if described := _described(data):
        lines.append(f'<p class="soft">{escape(described)}</p>')
    loss = _loss(data)
    if data.verdict is not None:
        lines.append(f'<div class="top">{_verdict(data.verdict)}{loss}</div>')
    lines += [f'<p class="note">{escape(note)}</p>' for note in data.notes]
    keyed = zip(data.compared, ("step", "update", "memory"), strict=True)
    known = [(row, key) for row, key in keyed if row.predicted or row.measured]
    lines.append(f'<div class="cards">{"".join(_card(row, key) for row, key in known)}</div>')
    return "\n".join(lines)


def _described(data: ReportData) -> str:
    """The model, the ranks and the steps, in one line."""
    parts = []
    if data.plan is not None:
        plan = data.plan
        model = data.facts.model if data.facts is not None and data.facts.model else "a model"
        parts.append(f"{model} of {format_parameters(plan.model.num_parameters)} parameters")
        parts.append(counted(plan.mesh.grid.world_size, "rank"))
    if data.steps:
        count = len(data.steps)
        last = "" if data.steps[-1].step == count else f", the last is number {data.steps[-1].step}"
        parts.append(f"{count} step{'s' * (count != 1)}{last}")
    if data.facts is not None:
        parts += filter(None, (data.facts.state, data.facts.begun))
    return " · ".join(parts)


def _verdict(verdict: Verdict) -> str:
    first, *others = verdict.figures
    rest = "".join(f", {escape(figure)}" for figure in others)
    return (
        f'<div class="verdict" id="verdict"><p><b>{escape(first)}</b>{rest}.</p>'
        f"<p><b>Next:</b> {escape(verdict.next)}.</p></div>"
    )


def _loss(data: ReportData) -> str:
    losses = [step.loss for step in data.steps if step.loss is not None]
    if not losses:
        return ""
    told = f"loss {format_loss(losses[0])}"
    if len(losses) > 1:
        told += f" to {format_loss(losses[-1])}"
    return f'<div class="loss">{sparkline(losses, told)}<span class="soft">{told}</span></div>'


def sparkline(values: Sequence[float], label: str) -> str:
    """A small curve without axes, as SVG; of many values, the mean of each stretch."""
    width = -(-len(values) // _MOST_POINTS)
    means = [
        sum(each) / len(each) for each in (values[at : at + width] for at in range(0, len(values), width))
    ]
    low, high = min(means), max(means)
    points = [
        (
            4 + (_WIDTH - 8) * (number / (len(means) - 1) if len(means) > 1 else 0.5),
            4 + (_HEIGHT - 8) * ((high - value) / (high - low) if high > low else 0.5),
        )
        for number, value in enumerate(means)
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    end_x, end_y = points[-1]
    return (
        f'<svg class="spark" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(label)}">'
        f'<polyline points="{line}"/><circle cx="{end_x:.1f}" cy="{end_y:.1f}" r="3"/></svg>'
    )


def _card(row: Compared, key: str) -> str:
    form = format_bytes if key == "memory" else format_seconds
    figures = "".join(
        f'<div><span class="soft">{part}</span><b data-figure="{key}_{part}" data-value="{value!r}">'
        f"{form(value)}</b></div>"
        for part, value in (("predicted", row.predicted), ("measured", row.measured))
        if value is not None
    )
    apart = "" if row.above is None else difference(row.predicted, row.measured, num_bytes=key == "memory")
    error = f'<div class="soft">{apart}</div>' if apart else ""
    if row.remark:
        error = f'<div class="soft">{escape(row.remark)}</div>'
    whole = row.name.startswith("peak")
    memory = "Peak memory of a rank" if whole else "Memory of a rank, without temporaries"
    title = {"step": "Step time", "update": "Optimizer's update", "memory": memory}[key]
    return f'<div class="card"><div class="soft">{title}</div><div class="pair">{figures}</div>{error}</div>'


def facts(data: ReportData) -> str:
    """What the run was, or the plan of none, in one block."""
    rows = [] if data.facts is None else data.facts.rows()
    if data.plan is not None:
        rows += _of_plan(data.plan)
    if not rows:
        return ""
    listed = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in rows)
    title = "The plan" if data.facts is None and not data.steps else "The run"
    return f'<h2>{title}</h2>\n<dl class="facts">{listed}</dl>'


def _of_plan(plan: Plan) -> list[tuple[str, str]]:
    mesh, schedule = plan.mesh.grid, plan.schedule
    degrees = f"pipeline {mesh.pipeline} x data {mesh.data}{mesh.shared_title}, placement {mesh.placement}"
    if mesh.shard > 1:
        degrees += f", each {mesh.shard} replicas share parameters"
    stages = counted(len(plan.stages), "stage")
    rows = [
        ("ranks", f"{mesh.world_size}: {degrees}"),
        ("schedule", f"{schedule.kind}, {counted(schedule.microbatches, 'microbatch', 'es')}, {stages}"),
        ("units", f"{len(plan.model.units)}, fingerprint {plan.model.fingerprint}"),
        ("plan made by", plan.created_by),
    ]
    if plan.prediction is not None:
        conditions = plan.prediction.conditions
        # Cores are counted for pipeline ranks, and those that share their layers have some, too.
        cores = [counted(conditions.cores, "core")] if conditions.cores and mesh.share == 1 else []
        rows.append(("a replica spans", ", ".join([counted(len(set(conditions.hosts)), "host"), *cores])))
    return rows


def render_page(data: ReportData, *, library: str) -> str:
    plots = charts(data)
    sections = (
        head(data),
        timeline(data, plots),
        stage_map(data.plan),
        parts(data, plots),
        stage_table(data),
        memory(data, plots),
        alternatives(data.plan),
        reasons(data.plan),
        metrics(data, plots),
        facts(data),
    )
    return page_of(data.name, sections, plots, library=library)


def page_of(title: str, sections: Sequence[str], plots: Mapping[str, Figure], *, library: str) -> str:
    figures = json.dumps(plots, allow_nan=False).replace("<", "\\u003c")
    nonce = hashlib.sha256(figures.encode()).hexdigest()[:32]
    policy = (
        f"default-src 'none'; script-src 'nonce-{nonce}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    body = "\n".join(filter(None, sections))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)} - Shardwright</title>
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


INSTALL = "pip install 'shardwright[report]'"

# Level 9 saves 3 % of the file for three times the seconds.
_LEVEL = 6


def check_plotly() -> None:
    if find_spec("plotly") is None:
        raise UsageError(
            f"a report needs the package plotly, which is not installed. Run: {INSTALL}. "
            "Without it: shardwright report RUN --json, or shardwright explain RUN."
        )


@cache
def packed_library() -> str:
    """plotly.js, compressed with gzip, in base64."""
    check_plotly()
    spec = find_spec("plotly")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        file = Path(folder, "package_data", "plotly.min.js")
        if file.is_file():
            packed = gzip.compress(file.read_bytes(), compresslevel=_LEVEL, mtime=0)
            return base64.b64encode(packed).decode("ascii")
    raise UsageError(
        f"the installed plotly has no package_data/plotly.min.js, which version 7 has. Run: {INSTALL}"
    )


def write_report(path: Path, file: Path) -> Path:
    """Writes the report of a run folder or a plan file, whole or not at all; returns `file`."""
    page = render_page(gather(path), library=packed_library())
    try:
        replace_file(file, page, follows=file.parent != path)
    except OSError as error:
        raise UsageError(
            f"the report cannot be written to {printable(str(file))}: {error.strerror}. Name another file "
            "with -o."
        ) from error
    return file

"""The sections of a report below its head, as HTML."""

from collections.abc import Mapping, Sequence

from shardwright.observe.report.drawn.colors import PART_COLORS, Figure
from shardwright.observe.report.gathered.compared import worst_of
from shardwright.observe.report.gathered.data import ReportData
from shardwright.observe.report.gathered.parts import StepPart
from shardwright.observe.report.html import escape
from shardwright.observe.report.pages.tables import bytes_of, difference, seconds_of, table
from shardwright.plan import Plan
from shardwright.quantities import format_bytes, format_seconds

__all__ = ["alternatives", "memory", "metrics", "parts", "parts_table", "plot", "reasons", "timeline"]

_SLIGHT = 0.02
"""A difference of this share or less is marked in no row."""

_ZOOM = '<span class="mouse">Drag across the plot to zoom in, click twice to zoom out.</span>'


def plot(plots: Mapping[str, Figure], name: str, *, label: str) -> str:
    """The place of a plot; empty where there is none of that name."""
    figure = plots.get(name)
    if figure is None:
        return ""
    return (
        f'<div class="plot" id="plot-{name}" role="img" aria-label="{escape(label)}" '
        f'style="height:{figure["height"]}px"></div>'
    )


def timeline(data: ReportData, plots: Mapping[str, Figure]) -> str:
    """Predicted above measured, and a choice of the recorded steps."""
    drawn = plot(plots, "timeline", label="Timeline of the pipeline, predicted above measured")
    if not drawn:
        return ""
    lines = ["<h2>Timeline of a step</h2>"]
    if len(data.ranks) < data.num_ranks:
        lines.append(
            f'<p class="soft">{len(data.ranks)} of {data.num_ranks} pipeline ranks are shown, among them '
            "those with most work and most memory.</p>"
        )
    if data.plan is not None and data.plan.mesh.share > 1:
        share = data.plan.mesh.share
        lines.append(f'<p class="soft">Each of these ranks stands for the {share} that share its layers.</p>')
    if len(data.recorded) > 1 and data.timeline is not None:
        buttons = "".join(
            f'<button type="button" data-plot="timeline{"" if each == data.timeline else f"@{each.step}"}" '
            f'aria-pressed="{"true" if each == data.timeline else "false"}">'
            f"step {each.step}, {seconds_of(each.seconds)}</button>"
            for each in data.recorded
        )
        lines.append(f'<div class="choice" role="group" aria-label="Recorded step">{buttons}</div>')
    lines.append(drawn)
    hint = _ZOOM
    if data.trace_file is not None:
        name = escape(data.trace_file)
        hint += f' <a href="{name}">{name}</a> has all of it: open it at ui.perfetto.dev.'
    return "\n".join([*lines, f'<p class="soft hint">{hint}</p>'])


def parts(data: ReportData, plots: Mapping[str, Figure]) -> str:
    """What a step is spent on."""
    if not data.parts:
        return ""
    told = _measured_in(data)
    if data.predicted is not None and data.predicted.update_s:
        told += f"The optimizer's update comes on top: {format_seconds(data.predicted.update_s)} predicted."
    return "\n".join(
        [
            "<h2>Where the step goes</h2>",
            f'<p class="soft">{told}</p>' if told else "",
            plot(plots, "waterfall", label="Parts of the step, predicted beside measured"),
            parts_table(data.parts),
            _spread(data),
        ]
    )


def _measured_in(data: ReportData) -> str:
    """Which step the parts are of, and how it compares with the others."""
    timeline = data.timeline
    if timeline is None or timeline.step is None:
        return ""
    usual_s = data.compared[0].measured
    told = f"Measured are the parts of step {timeline.step}"
    if timeline.seconds is None or usual_s is None:
        return f"{told}. "
    return f"{told}, which took {format_seconds(timeline.seconds)}; the median is {format_seconds(usual_s)}. "


def parts_table(rows: Sequence[StepPart], names: tuple[str, str] = ("predicted", "measured")) -> str:
    """The parts with their sum, the one furthest above its prediction marked."""
    cells: list[list[str]] = []
    finer: list[int] = []
    marked: dict[int, int] = {}
    for number, part in enumerate(rows):
        marked[number] = len(cells)
        color = f'<span class="kind" style="background:{PART_COLORS[part.kind]}"></span>'
        named_value = f'data-part="{part.kind}" data-value="{part.predicted!r}"'
        predicted = f"<span {named_value}>{seconds_of(part.predicted)}</span>"
        named = f'{color}{part.kind}<div class="soft">{escape(part.meaning)}</div>'
        cells.append([named, predicted, seconds_of(part.measured), difference(part.predicted, part.measured)])
        for each in part.finer:
            finer.append(len(cells))
            title = f'<span title="{escape(each.meaning)}">{escape(each.name)}</span>'
            cells.append([title, seconds_of(each.seconds), "", ""])
    sums = [_sum([part.predicted for part in rows]), _sum([part.measured for part in rows])]
    cells.append(["<b>step</b>", *map(seconds_of, sums), difference(*sums)])
    worst = worst_of(rows, least=_SLIGHT * (sums[0] or 0.0))
    header = ["part", *names, "difference"]
    if all(part.measured is None for part in rows):
        header, cells = header[:2], [row[:2] for row in cells]
    return table(header, cells, worst=None if worst is None else marked[worst], finer=finer)


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _spread(data: ReportData) -> str:
    """The finer parts of a prediction that lie in several rows."""
    if data.predicted is None:
        return ""
    listed = {each.name for part in data.parts for each in part.finer} | {part.kind for part in data.parts}
    rest = [
        f"{escape(part.name)} {seconds_of(part.seconds)}"
        for part in data.predicted.waterfall.parts
        if part.name not in listed
    ]
    return f'<p class="soft">Predicted in several of these rows: {", ".join(rest)}.</p>' if rest else ""


def memory(data: ReportData, plots: Mapping[str, Figure]) -> str:
    """Predicted beside measured, of the same things."""
    over_step = plot(plots, "memory", label="Memory of each rank over a step")
    stack = plot(plots, "stack", label="Memory of each rank at its peak")
    if not over_step and not stack:
        return ""
    limit_bytes = data.predicted.limit_bytes if data.predicted is not None else 0
    limit = format_bytes(limit_bytes) if limit_bytes else "not known"
    shown = f'<b data-figure="limit" data-value="{limit_bytes!r}">{limit}</b>'
    lines = ["<h2>Memory</h2>", f"<p>Limit of a rank: {shown}.</p>"]
    if data.memory:
        shown_rows = [row for row in data.memory if row.rank in data.ranks]
        lines += [
            '<p class="soft">Parameters, gradients, optimizer state, activations, at the end of the action '
            "where they are most. What else the process has in use (the interpreter, libraries, data) is "
            "measured after a step, and taken off.</p>",
            table(
                ["rank", "predicted", "measured", "difference"],
                [
                    [
                        str(row.rank),
                        bytes_of(row.predicted),
                        bytes_of(row.measured),
                        difference(row.predicted, row.measured, num_bytes=True),
                    ]
                    for row in shown_rows
                ],
                worst=worst_of(shown_rows, least=_SLIGHT * max(row.predicted or 0.0 for row in shown_rows)),
            ),
        ]
    if over_step:
        whole = (
            " Measured is all that the process has in use, Python and its libraries too."
            if data.timeline is not None and not data.memory
            else ""
        )
        lines += [
            f'<p class="soft">Over a step, without the temporaries of operations.{whole}</p>',
            over_step,
        ]
    if stack:
        told = " Measured is without batch and temporaries (work)." if data.memory else ""
        lines += [f'<p class="soft">At the peak of each rank, part by part.{told}</p>', stack]
    if data.measures_processes and data.peak_by_rank:
        most = max(data.peak_by_rank)
        lines.append(
            f'<p class="soft">The largest process had {format_bytes(most)} at its peak, interpreter and '
            "libraries included.</p>"
        )
    return "\n".join(lines)


def alternatives(plan: Plan | None) -> str:
    """The next best plans."""
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
    return "<h2>Runners-up</h2>\n" + table(header, rows, text=(0, 5))


def reasons(plan: Plan | None) -> str:
    """Why the planner chose this one."""
    if plan is None or not plan.why:
        return ""
    return "<h2>Why this plan</h2>\n<ul>" + "".join(f"<li>{escape(why)}</li>" for why in plan.why) + "</ul>"


def metrics(data: ReportData, plots: Mapping[str, Figure]) -> str:
    """Loss and seconds of all steps."""
    loss = plot(plots, "loss", label="Loss over the steps")
    steps = plot(plots, "steps", label="Seconds of each step")
    first_s = data.steps[0].step_s if len(data.steps) > 1 else None
    note = ""
    if first_s is not None:
        note = (
            f'<p class="soft">Without the first step, {format_seconds(first_s)}, which traces and plans.</p>'
        )
    return f"<h2>Over the run</h2>\n{loss}\n{note}\n{steps}" if loss or steps else ""

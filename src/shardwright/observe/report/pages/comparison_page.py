"""The page of two runs, drawn over each other."""

from shardwright.observe.report.drawn.charts import line_chart, measured_half, parts_chart
from shardwright.observe.report.drawn.colors import Figure
from shardwright.observe.report.drawn.timeline_chart import Half, time_axis, timeline_chart
from shardwright.observe.report.gathered.comparison import Comparison
from shardwright.observe.report.gathered.spans import choose_ranks, thin
from shardwright.observe.report.html import escape
from shardwright.observe.report.pages.page import page_of
from shardwright.observe.report.pages.sections import parts_table, plot
from shardwright.observe.report.pages.tables import table

__all__ = ["comparison_charts", "render_comparison"]


def render_comparison(comparison: Comparison, *, library: str) -> str:
    """The page.

    Args:
        comparison: of two runs.
        library: plotly.js, compressed with gzip, in base64.
    """
    plots = comparison_charts(comparison)
    title = " and ".join(comparison.names)
    sections = (
        _head(comparison),
        _section("Timelines of a step", plot(plots, "timeline", label="Timelines of both runs")),
        _parts(comparison, plot(plots, "waterfall", label="Parts of a step of both runs")),
        _section("Loss", plot(plots, "loss", label="Loss of both runs")),
        _section("Time of each step", plot(plots, "steps", label="Seconds of each step of both runs")),
        _differences(comparison),
    )
    return page_of(title, sections, plots, library=library)


def comparison_charts(comparison: Comparison) -> dict[str, Figure]:
    """The plots for which there is something to show, by name."""
    found: dict[str, Figure] = {}
    names, both = comparison.labels, comparison.data
    halves: list[Half] = []
    ranks = choose_ranks(max(data.num_ranks for data in both))
    for name, data in zip(names, both, strict=True):
        if data.timeline is not None:
            title, spans, end_s = measured_half(data.timeline, name)
            halves.append((title, thin(spans, ranks), end_s))
    if halves:
        found["timeline"] = timeline_chart(halves, ranks)
    if comparison.parts:
        found["waterfall"] = parts_chart(comparison.parts, names)
    losses = [[(step.step, step.loss) for step in data.steps if step.loss is not None] for data in both]
    if any(losses):
        curves = zip(names, losses, strict=True)
        found["loss"] = line_chart(
            [(name, [at for at, _ in row], [loss for _, loss in row]) for name, row in curves if row], "loss"
        )
    # Without the first step of each, which traces and plans.
    times = [
        [(step.step, step.step_s) for step in data.steps[1:] if step.step_s is not None] for data in both
    ]
    if any(times):
        scale, unit = time_axis(max(seconds for row in times for _, seconds in row))
        found["steps"] = line_chart(
            [
                (name, [at for at, _ in row], [seconds * scale for _, seconds in row])
                for name, row in zip(names, times, strict=True)
                if row
            ],
            f"{unit} a step",
        )
        found["steps"]["layout"]["yaxis"]["rangemode"] = "tozero"
    return found


def _head(comparison: Comparison) -> str:
    first, second = map(escape, comparison.labels)
    if comparison.labels != comparison.names:
        called = zip(comparison.labels, map(escape, comparison.names), strict=True)
        title = "<br>".join(f'<span class="soft">{label}</span> {name}' for label, name in called)
    else:
        title = f"{first} and {second}"
    rows = [[escape(cell) for cell in row.cells()] for row in comparison.rows]
    return "\n".join(
        [
            f"<h1>{title}</h1>",
            f'<div class="top"><div class="verdict" id="verdict">{escape(comparison.verdict)}.</div></div>',
            table(["", first, second, "change"], rows),
        ]
    )


def _section(title: str, content: str) -> str:
    return f"<h2>{title}</h2>\n{content}" if content else ""


def _parts(comparison: Comparison, drawn: str) -> str:
    if not comparison.parts:
        return ""
    first, second = map(escape, comparison.labels)
    return _section("Where the step goes", drawn + parts_table(comparison.parts, (first, second)))


def _differences(comparison: Comparison) -> str:
    first, second = map(escape, comparison.labels)
    if not comparison.differences:
        return _section("What was different", "<p>Nothing that is written down.</p>")
    rows = [[escape(d.what), escape(d.first), escape(d.second)] for d in comparison.differences]
    return _section("What was different", table(["", first, second], rows, text=(0, 1, 2), wide=True))

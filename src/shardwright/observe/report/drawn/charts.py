"""The plots of a report, as plotly.js figures: plain data, made without a library."""

from collections.abc import Sequence
from typing import Any

from shardwright.observe.report.drawn.colors import PART_COLORS, TEXT, Figure, bars
from shardwright.observe.report.drawn.memory_charts import memory_over_step, memory_stack
from shardwright.observe.report.drawn.timeline_chart import Half, time_axis, timeline_chart
from shardwright.observe.report.gathered.data import ReportData
from shardwright.observe.report.gathered.measured import MeasuredTimeline
from shardwright.observe.report.gathered.parts import StepPart

__all__ = ["Figure", "charts"]

_MOST_POINTS = 2000
_LINE_PX = 260
_PART_PX = 40


def charts(data: ReportData) -> dict[str, Figure]:
    """All plots for which there is something to show, by name.

    A name with an ``@`` is another choice for the plot before it: ``timeline@3`` shows step 3.
    """
    found = {}
    if data.predicted is not None or data.timeline is not None:
        found["timeline"] = _timeline(data, data.timeline)
        others = [each for each in data.recorded if each != data.timeline]
        found |= {f"timeline@{each.step}": _timeline(data, each) for each in others}
    if data.parts:
        found["waterfall"] = parts_chart(data.parts)
    if (data.predicted is not None and data.predicted.memory) or (data.timeline and data.timeline.memory):
        found["memory"] = memory_over_step(data)
    stack = memory_stack(data)
    if stack["data"]:
        found["stack"] = stack
    numbers = [step.step for step in data.steps]
    if any(step.loss is not None for step in data.steps):
        found["loss"] = line_chart([("loss", numbers, [step.loss for step in data.steps])], "loss")
    # The first step traces and plans: it would flatten the others.
    steady = data.steps[1:] or data.steps
    if any(step.step_s is not None for step in steady):
        times = [step.step_s for step in steady]
        predicted_s = data.compared[0].predicted
        found["steps"] = _step_times([step.step for step in steady], times, predicted_s)
    return found


def measured_half(timeline: MeasuredTimeline, name: str = "measured") -> Half:
    """A recorded step as a half of a timeline."""
    title = name if timeline.step is None else f"{name}, step {timeline.step}"
    return title, timeline.spans, max((span.end_s for span in timeline.spans), default=0.0)


def _timeline(data: ReportData, timeline: MeasuredTimeline | None) -> Figure:
    halves: list[Half] = []
    if data.predicted is not None:
        halves.append(("predicted", data.predicted.spans, data.predicted.step_s))
    if timeline is not None:
        halves.append(measured_half(timeline))
    return timeline_chart(halves, data.ranks)


def parts_chart(parts: Sequence[StepPart], names: tuple[str, str] = ("predicted", "measured")) -> Figure:
    """A waterfall: each part begins where the one before ends, once in each of two rows."""
    sums = [
        sum(value for part in parts if (value := getattr(part, attribute)) is not None)
        for attribute in ("predicted", "measured")
    ]
    scale, unit = time_axis(max(sums))
    traces = []
    for attribute, name in zip(("predicted", "measured"), names, strict=True):
        values = [getattr(part, attribute) for part in parts]
        if all(value is None for value in values):
            continue
        before, starts = 0.0, []
        for value in values:
            starts.append(before * scale)
            before += value or 0.0
        trace = bars([part.kind for part in parts], starts, [(value or 0.0) * scale for value in values], "")
        trace["marker"] = {"color": [PART_COLORS[part.kind] for part in parts]}
        if attribute == "predicted":
            trace["marker"]["pattern"] = {"shape": "/", "size": 6, "solidity": 0.35}
        trace |= {"name": name, "hovertemplate": f"%{{y}}, {name}: %{{x:.4g}} {unit}<extra></extra>"}
        traces.append(trace)
    layout = {
        "showlegend": len(traces) > 1,
        "legend": {
            "orientation": "h",
            "yref": "container",
            "y": 0,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "barmode": "group",
        "bargap": 0.25,
        "xaxis": {"title": {"text": unit}},
        "yaxis": {"autorange": "reversed", "fixedrange": True},
    }
    return {"data": traces, "layout": layout, "height": 120 + _PART_PX * len(parts)}


def _step_times(numbers: Sequence[int], values: Sequence[float | None], predicted_s: float | None) -> Figure:
    known = [value for value in values if value is not None]
    scale, unit = time_axis(max([*known, predicted_s or 0.0]))
    measured = [None if value is None else value * scale for value in values]
    figure = line_chart([("measured", numbers, measured)], f"{unit} a step")
    figure["layout"]["yaxis"]["rangemode"] = "tozero"
    if predicted_s is not None:
        ends = [numbers[0], numbers[-1]]
        line = {"color": TEXT, "dash": "dash", "width": 1}
        figure["data"].append(
            {
                **_line("predicted", ends, [predicted_s * scale] * 2, line),
                "mode": "lines" if len(numbers) > 1 else "markers",
            }
        )
        figure["layout"]["showlegend"] = True
    return figure


def line_chart(curves: Sequence[tuple[str, Sequence[int], Sequence[float | None]]], title: str) -> Figure:
    """Curves over steps. Of two, the first is dashed, as it is hatched elsewhere on the page."""
    traces = []
    dashes = ("solid",) if len(curves) == 1 else ("dash", "solid")
    for (name, numbers, values), dash in zip(curves, dashes, strict=True):
        every = max(1, -(-len(numbers) // _MOST_POINTS))
        x, y = list(numbers[::every]), list(values[::every])
        traces.append(_line(name, x, y, {"color": TEXT, "dash": dash, "width": 1.5}))
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": title}, "fixedrange": True},
        "legend": {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"},
        "showlegend": len(traces) > 1,
    }
    return {"data": traces, "layout": layout, "height": _LINE_PX}


def _line(name: str, x: list[Any], y: list[Any], line: dict[str, Any]) -> dict[str, Any]:
    mode = "lines" if len(x) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "line": line}

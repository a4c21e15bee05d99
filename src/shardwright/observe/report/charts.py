"""The plots of a report, as plotly.js figures: plain data, made without a library."""

from collections.abc import Sequence
from typing import Any

from shardwright.observe.report.data import ReportData
from shardwright.observe.report.measured import MeasuredTimeline
from shardwright.observe.report.parts import StepPart
from shardwright.observe.report.timeline_chart import (
    BAD,
    LEGEND,
    MEMORY_COLORS,
    PART_COLORS,
    TEXT,
    Figure,
    Half,
    bars,
    lane,
    time_axis,
    timeline_chart,
)

__all__ = ["Figure", "charts", "memory_over_step", "memory_stack"]

_MOST_LANES = 8
_MOST_POINTS = 2000
_ROW_PX = 84
_BAR_PX = 26
_MIB = 2**20

_Moments = Sequence[tuple[float, float]]


def memory_over_step(data: ReportData) -> Figure:
    """A row for each rank: predicted as an area, measured as a line; of many ranks, those that need most."""
    predicted, measured = _predicted(data), _measured(data)
    highest = {
        rank: max(num_bytes for row in (predicted, measured) for _, num_bytes in row.get(rank, ()))
        for rank in predicted.keys() | measured.keys()
    }
    shown = sorted(sorted(highest, key=lambda rank: (-highest[rank], rank))[:_MOST_LANES])
    moments = [each for row in (predicted, measured) for rank in shown for each in row.get(rank, ())]
    scale, unit = time_axis(max((at_s for at_s, _ in moments), default=0.0))
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": f"{unit} from the first work"}, "rangemode": "tozero"},
        "legend": LEGEND,
        "showlegend": bool(measured),
    }
    for index, rank in enumerate(shown):
        number = "" if index == 0 else str(index + 1)
        for row, name, style in (
            (predicted.get(rank), "predicted", {"dash": "dash", "color": MEMORY_COLORS["optimizer"]}),
            (measured.get(rank), "measured", {"dash": "solid", "color": TEXT}),
        ):
            if row:
                curve = _curve(_fewer(row), f"rank {rank}, {name}", style, scale, unit)
                curve |= {"yaxis": f"y{number}", "name": name, "legendgroup": name, "showlegend": index == 0}
                if name == "predicted":
                    curve |= {"fill": "tozeroy", "fillcolor": "rgba(141,124,201,0.25)"}
                traces.append(curve)
        bottom = (len(shown) - 1 - index) / len(shown)
        layout[f"yaxis{number}"] = {
            "domain": [bottom, bottom + 0.8 / len(shown)],
            "title": {"text": f"{lane(rank)}<br>MiB"},
            "rangemode": "tozero",
            "fixedrange": True,
            "nticks": 4,
        }
    if len(shown) > 1:
        layout["xaxis"]["anchor"] = f"y{len(shown)}"
    return {"data": traces, "layout": layout, "height": 110 + _ROW_PX * max(len(shown), 2)}


def _predicted(data: ReportData) -> dict[int, _Moments]:
    """What lasts and what is kept for backwards; without the batch where what is measured is without it."""
    if data.predicted is None:
        return {}
    others = {} if data.timeline is None else data.timeline.other_bytes
    found: dict[int, _Moments] = {}
    for row in data.predicted.memory:
        lasting_bytes = row.lasting_bytes
        if row.rank in others:
            lasting_bytes -= data.predicted.stack[row.rank].batch_bytes
        found[row.rank] = [(at_s, lasting_bytes + held) for at_s, held in row.moments]
    return found


def _measured(data: ReportData) -> dict[int, _Moments]:
    """What was in use, without what is not the training's where that is known."""
    timeline = data.timeline
    if timeline is None:
        return {}
    return {
        rank: [(at_s, in_use - timeline.other_bytes.get(rank, 0)) for at_s, in_use in moments]
        for rank, moments in timeline.memory.items()
        if rank in data.ranks
    }


def _curve(moments: _Moments, name: str, line: dict[str, str], scale: float, unit: str) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [at_s * scale for at_s, _ in moments],
        "y": [num_bytes / _MIB for _, num_bytes in moments],
        "line": {"shape": "hv", "width": 1.5, **line},
        "hovertemplate": f"{name}: %{{y:.4g}} MiB at %{{x:.4g}} {unit}<extra></extra>",
    }


def _fewer(moments: _Moments) -> list[tuple[float, float]]:
    """At most some thousand moments; of each stretch, the one with most bytes."""
    width = -(-len(moments) // _MOST_POINTS)
    return [
        max(moments[at : at + width], key=lambda moment: moment[1]) for at in range(0, len(moments), width)
    ]


def memory_stack(data: ReportData) -> Figure:
    """The parts of each rank's predicted peak, and what was measured of the same."""
    stack = data.predicted.stack if data.predicted is not None else ()
    measured = _peaks(data)
    ranks = [rank for rank in data.ranks if rank < len(stack) or rank in measured]
    lanes = [lane(rank) for rank in ranks]
    traces: list[dict[str, Any]] = []
    for part, color in MEMORY_COLORS.items():
        sizes = [getattr(stack[rank], f"{part}_bytes") / _MIB for rank in ranks] if stack else []
        if any(sizes):
            traces.append(
                {
                    **bars(lanes, [], sizes, color),
                    "name": part,
                    "hovertemplate": f"{part} of %{{y}}: %{{x:.4g}} MiB<extra></extra>",
                }
            )
            del traces[-1]["base"]
    if measured:
        known = [rank for rank in ranks if rank in measured]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured",
                "y": [lane(rank) for rank in known],
                "x": [measured[rank] / _MIB for rank in known],
                "marker": {
                    "symbol": "diamond",
                    "size": 11,
                    "color": TEXT,
                    "line": {"width": 1.5, "color": "@back"},
                },
                "hovertemplate": "measured on %{y}: %{x:.4g} MiB<extra></extra>",
            }
        )
    layout: dict[str, Any] = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "MiB"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "type": "category"},
        "legend": LEGEND,
    }
    limit_bytes = data.predicted.limit_bytes if data.predicted is not None else 0
    highest = max([part.peak_bytes for part in stack] + list(measured.values()), default=0)
    # A limit far above everything would flatten the bars; then only the text says it.
    if 0 < limit_bytes < 4 * highest:
        at = {"x0": limit_bytes / _MIB, "x1": limit_bytes / _MIB, "y0": 0, "y1": 1, "yref": "paper"}
        label = {"text": "limit", "textposition": "end"}
        layout["shapes"] = [{"type": "line", **at, "line": {"color": BAD, "width": 2}, "label": label}]
    return {"data": traces, "layout": layout, "height": 120 + _BAR_PX * len(ranks)}


def _peaks(data: ReportData) -> dict[int, float]:
    """Measured peaks that mean what is predicted; nothing where the process around it would be among them."""
    if data.memory:
        return {row.rank: row.measured for row in data.memory if row.measured is not None}
    return dict(enumerate(data.peak_by_rank)) if not data.measures_processes else {}


_LINE_PX = 260
_PART_PX = 40


def charts(data: ReportData) -> dict[str, Figure]:
    """All plots for which there is something to show, by name."""
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
        found["loss"] = line_chart("loss", numbers, [step.loss for step in data.steps], "loss")
    # The first step traces and plans: it would flatten the others.
    steady = data.steps[1:] or data.steps
    times = [step.seconds or None for step in steady]
    if any(times):
        predicted_s = data.compared[0].predicted
        found["steps"] = _step_times([step.step for step in steady], times, predicted_s)
    return found


def _timeline(data: ReportData, timeline: MeasuredTimeline | None) -> Figure:
    halves: list[Half] = []
    if data.predicted is not None:
        halves.append(("predicted", data.predicted.spans, data.predicted.step_s))
    if timeline is not None:
        end_s = max((span.end_s for span in timeline.spans), default=0.0)
        halves.append((f"measured, step {timeline.step}", timeline.spans, end_s))
    return timeline_chart(halves, data.ranks)


def parts_chart(parts: Sequence[StepPart]) -> Figure:
    """A waterfall: each part begins where the one before ends, once in each of two rows."""
    sums = [
        sum(value for part in parts if (value := getattr(part, attribute)) is not None)
        for attribute in ("predicted", "measured")
    ]
    scale, unit = time_axis(max(sums))
    traces = []
    for name in ("predicted", "measured"):
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values):
            continue
        before, starts = 0.0, []
        for value in values:
            starts.append(before * scale)
            before += value or 0.0
        trace = bars([part.kind for part in parts], starts, [(value or 0.0) * scale for value in values], "")
        trace["marker"] = {"color": [PART_COLORS[part.kind] for part in parts]}
        if name == "predicted":
            trace["marker"]["pattern"] = {"shape": "/", "size": 6, "solidity": 0.35}
        trace |= {"name": name, "hovertemplate": f"%{{y}}, {name}: %{{x:.4g}} {unit}<extra></extra>"}
        traces.append(trace)
    layout = {
        "showlegend": len(traces) > 1,
        "legend": LEGEND,
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
    figure = line_chart("measured", numbers, measured, f"{unit} a step")
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


def line_chart(name: str, numbers: Sequence[int], values: Sequence[float | None], title: str) -> Figure:
    every = max(1, -(-len(numbers) // _MOST_POINTS))
    line = {"color": TEXT, "dash": "solid", "width": 1.5}
    traces = [_line(name, list(numbers[::every]), list(values[::every]), line)]
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": title}, "fixedrange": True},
        "legend": LEGEND,
        "showlegend": False,
    }
    return {"data": traces, "layout": layout, "height": _LINE_PX}


def _line(name: str, x: list[Any], y: list[Any], line: dict[str, Any]) -> dict[str, Any]:
    mode = "lines" if len(x) > 1 else "markers"
    return {"type": "scatter", "mode": mode, "name": name, "x": x, "y": y, "line": line}

"""The plots of a report, as plotly.js figures: plain data, made without a library."""

from collections.abc import Iterable, Sequence
from typing import Any

from shardwright.observe.report.data import Predicted, ReportData
from shardwright.observe.report.html import escape
from shardwright.observe.report.spans import Span

__all__ = ["COLORS", "PART_COLORS", "charts"]

COLORS = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "input": "#D55E00",
    "weight": "#CC79A7",
    "send": "#009E73",
    "wait": "#8C8C8C",
    "offload": "#56B4E9",
    "load": "#F0E442",
    "idle": "rgba(140,140,140,0.22)",
}
"""Okabe and Ito's palette, which people of all kinds of colour vision tell apart."""

PART_COLORS = {
    "compute": "#0072B2",
    "recomputation": "#56B4E9",
    "communication": "#009E73",
    "bubble": "#8C8C8C",
    "imbalance": "#CC79A7",
    "overhead": "#E69F00",
    "remainder": "#D55E00",
}
_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, inputs (I)",
    "weight": "backward, weights (W)",
    "send": "message",
    "wait": "waiting for a message",
    "offload": "copy to the host",
    "load": "copy from the host",
}
_MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "batch", "work")
_STACK_COLORS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#8C8C8C")
_LINE_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#8C8C8C")
_MOST_LINES = len(_LINE_COLORS)
_MOST_POINTS = 2000
_LANE_PX = 26
_TITLE_PX = 24
_MIB = 2**20
# Below the plot, where the buttons of plotly.js do not cover it.
_LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom"}

Figure = dict[str, Any]
"""``data`` and ``layout`` of plotly.js, and ``height`` in pixels."""


def charts(data: ReportData) -> dict[str, Figure]:
    """All plots for which there is something to show, by name."""
    found = {}
    if data.predicted is not None:
        found["waterfall"] = _waterfall(data.predicted)
    if (data.predicted is not None and data.predicted.memory) or (data.timeline and data.timeline.memory):
        found["memory"] = _memory(data)
    if data.predicted is not None or data.timeline is not None:
        found["timeline"] = _timeline(data)
    if (data.predicted is not None and data.predicted.stack) or data.peak_by_rank:
        found["stack"] = _stack(data)
    numbers = [step.step for step in data.steps]
    if any(step.loss is not None for step in data.steps):
        found["loss"] = _line(numbers, [step.loss for step in data.steps], "loss")
    # The first step traces and plans: it would flatten the others.
    steady = data.steps[1:] or data.steps
    if any(step.step_s is not None for step in steady):
        times = [step.step_s for step in steady]
        predicted_s = data.compared[0].predicted
        found["steps"] = _line([step.step for step in steady], times, "seconds of a step", predicted_s)
    return found


def _timeline(data: ReportData) -> Figure:
    halves: list[tuple[str, Sequence[Span], float]] = []
    if data.predicted is not None:
        halves.append(("predicted", data.predicted.spans, data.predicted.step_s))
    if data.timeline is not None:
        measured = data.timeline.spans
        halves.append(("measured", measured, max((span.end_s for span in measured), default=0.0)))
    half_px = _LANE_PX * len(data.ranks) + _TITLE_PX
    lanes_share = (half_px - _TITLE_PX) / half_px / len(halves)
    traces: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    title = {"text": "seconds from the first work"}
    layout: dict[str, Any] = {
        "barmode": "overlay",
        "bargap": 0.15,
        "xaxis": {"title": title, "anchor": "y" if len(halves) < 2 else "y2"},
        "legend": _LEGEND,
        "annotations": titles,
    }
    shown: set[str] = set()
    for index, (name, spans, end_s) in enumerate(halves):
        axis = "y" if index == 0 else "y2"
        traces += _lanes(name, spans, data.ranks, end_s, axis, shown)
        bottom = (len(halves) - 1 - index) / len(halves)
        layout["yaxis" if index == 0 else "yaxis2"] = {
            "domain": [bottom, bottom + lanes_share],
            "autorange": "reversed",
            "fixedrange": True,
            "type": "category",
            "categoryarray": [_lane(rank) for rank in data.ranks],
            "categoryorder": "array",
        }
        titles.append(_title(name, bottom + lanes_share))
    return {"data": traces, "layout": layout, "height": 170 + half_px * len(halves)}


def _title(text: str, y: float) -> dict[str, Any]:
    """A word above the lanes, at their left end."""
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": y, "yanchor": "bottom"}
    return {**place, "text": text, "showarrow": False}


def _lanes(
    name: str, spans: Sequence[Span], ranks: Sequence[int], end_s: float, axis: str, shown: set[str]
) -> Iterable[dict[str, Any]]:
    """Idle time as a band behind each lane, and the bars by kind in front of it."""
    yield {
        **_bars([_lane(rank) for rank in ranks], [0.0] * len(ranks), [end_s] * len(ranks), COLORS["idle"]),
        "name": "idle",
        "legendgroup": "idle",
        "showlegend": "idle" not in shown,
        "hoverinfo": "skip",
        "yaxis": axis,
    }
    shown.add("idle")
    for kind, title in _NAMES.items():
        own = [span for span in spans if span.kind == kind]
        if not own:
            continue
        trace = _bars(
            [_lane(span.rank) for span in own],
            [span.start_s for span in own],
            [span.end_s - span.start_s for span in own],
            COLORS[kind],
        )
        if kind == "send":
            trace |= {"width": 0.2}
        if kind in ("offload", "load"):
            trace |= {"width": 0.12, "offset": 0.33}  # beside the work, at the lower edge of the lane
        yield {
            **trace,
            "name": title,
            "legendgroup": kind,
            "showlegend": kind not in shown,
            "text": [escape(span.name) for span in own],
            "textposition": "none",
            "hovertemplate": f"%{{text}} on %{{y}}, {name}<br>"
            "%{base:.6g} s for %{x:.4g} s<extra></extra>",
            "yaxis": axis,
        }
        shown.add(kind)


def _bars(lanes: list[str], starts: list[float], lengths: list[float], color: str) -> dict[str, Any]:
    return {
        "type": "bar",
        "orientation": "h",
        "y": lanes,
        "base": starts,
        "x": lengths,
        "marker": {"color": color, "line": {"width": 0}},
    }


def _lane(rank: int) -> str:
    return f"rank {rank}"


def _waterfall(predicted: Predicted) -> Figure:
    parts = predicted.waterfall.parts
    before_s, starts = 0.0, []
    for part in parts:
        starts.append(before_s)
        before_s += part.seconds
    trace = _bars([part.name for part in parts], starts, [part.seconds for part in parts], "")
    trace["marker"] = {"color": [PART_COLORS[part.kind] for part in parts]}
    trace["hovertemplate"] = "%{y}: %{x:.4g} s<extra></extra>"
    total = _bars(["predicted step"], [0.0], [predicted.waterfall.step_s], "#4D4D4D")
    total["marker"] = {"color": "rgba(128,128,128,0.8)"}
    total["hovertemplate"] = "%{y}: %{x:.4g} s<extra></extra>"
    layout = {
        "showlegend": False,
        "barmode": "overlay",
        "xaxis": {"title": {"text": "seconds"}},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "automargin": True},
    }
    return {"data": [trace, total], "layout": layout, "height": 110 + 28 * (len(parts) + 1)}


def _memory(data: ReportData) -> Figure:
    """A line a rank, and a dotted one for what was measured; of many ranks, those that need most."""
    predicted = {
        row.rank: [(at_s, row.lasting_bytes + held) for at_s, held in row.moments]
        for row in (data.predicted.memory if data.predicted is not None else ())
    }
    measured = {
        rank: list(moments)
        for rank, moments in (data.timeline.memory if data.timeline is not None else {}).items()
        if rank in data.ranks
    }
    highest = {
        rank: max(num_bytes for row in (predicted, measured) for _, num_bytes in row.get(rank, ()))
        for rank in predicted.keys() | measured.keys()
    }
    shown = sorted(sorted(highest, key=lambda rank: (-highest[rank], rank))[:_MOST_LINES])
    traces = []
    for rank, color in zip(shown, _LINE_COLORS, strict=False):
        for moments, name, dash in (
            (predicted.get(rank), _lane(rank), "solid"),
            (measured.get(rank), f"{_lane(rank)}, measured", "dot"),
        ):
            if moments:
                traces.append(_curve(_fewer(moments), name, {"color": color, "dash": dash}))
    layout: dict[str, Any] = {
        "xaxis": {"title": {"text": "seconds from the first work"}},
        "yaxis": {"title": {"text": "MiB"}, "rangemode": "tozero", "fixedrange": True},
        "legend": _LEGEND,
    }
    limit_bytes = data.predicted.limit_bytes if data.predicted is not None else 0
    # A limit far above everything would flatten the lines; then only the text says it.
    if 0 < limit_bytes < 4 * max(highest.values()):
        layout["shapes"] = [_limit("y", limit_bytes)]
    return {"data": traces, "layout": layout, "height": 320}


def _curve(moments: Sequence[tuple[float, float]], name: str, line: dict[str, str]) -> dict[str, Any]:
    return {
        "type": "scatter",
        "mode": "lines",
        "name": name,
        "x": [at_s for at_s, _ in moments],
        "y": [num_bytes / _MIB for _, num_bytes in moments],
        "line": {"shape": "hv", "width": 1.5, **line},
        "hovertemplate": f"{name}: %{{y:.4g}} MiB at %{{x:.4g}} s<extra></extra>",
    }


def _fewer(moments: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most some thousand moments; of each stretch, the one with most bytes."""
    width = -(-len(moments) // _MOST_POINTS)
    return [
        max(moments[at : at + width], key=lambda moment: moment[1]) for at in range(0, len(moments), width)
    ]


def _stack(data: ReportData) -> Figure:
    stack = data.predicted.stack if data.predicted is not None else ()
    ranks = [rank for rank in data.ranks if rank < max(len(stack), len(data.peak_by_rank))]
    lanes = [_lane(rank) for rank in ranks]
    traces: list[dict[str, Any]] = []
    for part, color in zip(_MEMORY_PARTS, _STACK_COLORS, strict=True):
        sizes = [getattr(stack[rank], part) / _MIB for rank in ranks] if stack else []
        if any(sizes):
            traces.append(
                {
                    **_bars(lanes, [], sizes, color),
                    "name": part,
                    "hovertemplate": f"{part} of %{{y}}: %{{x:.4g}} MiB<extra></extra>",
                }
            )
            del traces[-1]["base"]
    if len(data.peak_by_rank) > max(ranks, default=-1):
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "measured peak",
                "y": lanes,
                "x": [data.peak_by_rank[rank] / _MIB for rank in ranks],
                "marker": {"symbol": "diamond", "size": 11, "color": "#D55E00"},
                "hovertemplate": "measured on %{y}: %{x:.4g} MiB<extra></extra>",
            }
        )
    layout: dict[str, Any] = {
        "barmode": "stack",
        "xaxis": {"title": {"text": "MiB"}, "rangemode": "tozero"},
        "yaxis": {"autorange": "reversed", "fixedrange": True, "type": "category"},
        "legend": _LEGEND,
    }
    limit_bytes = data.predicted.limit_bytes if data.predicted is not None else 0
    highest = max([part.peak for part in stack] + list(data.peak_by_rank), default=0)
    if 0 < limit_bytes < 4 * highest:
        layout["shapes"] = [_limit("x", limit_bytes)]
    return {"data": traces, "layout": layout, "height": 170 + _LANE_PX * len(ranks)}


def _limit(axis: str, num_bytes: float) -> dict[str, Any]:
    """A dashed line across the plot where memory ends."""
    other = "x" if axis == "y" else "y"
    ends = {f"{axis}0": num_bytes / _MIB, f"{axis}1": num_bytes / _MIB, f"{other}0": 0, f"{other}1": 1}
    style = {"color": "#D55E00", "dash": "dash", "width": 2}
    label = {"text": "limit", "textposition": "end"}
    return {"type": "line", f"{other}ref": "paper", **ends, "line": style, "label": label}


def _line(
    numbers: Sequence[int], values: Sequence[float | None], title: str, predicted: float | None = None
) -> Figure:
    every = -(-len(numbers) // _MOST_POINTS)
    x, y = list(numbers[::every]), list(values[::every])
    mode = "lines" if len(x) > 1 else "markers"
    traces: list[dict[str, Any]] = [
        {"type": "scatter", "mode": mode, "name": "measured", "x": x, "y": y, "line": {"color": "#0072B2"}}
    ]
    if predicted is not None:
        ends = [x[0], x[-1]]
        line = {"color": "#E69F00", "dash": "dash"}
        traces.append(
            {
                "type": "scatter",
                "mode": mode,
                "name": "predicted",
                "x": ends,
                "y": [predicted] * 2,
                "line": line,
            }
        )
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {"title": {"text": title}, "fixedrange": True},
        "legend": _LEGEND,
        "showlegend": predicted is not None,
    }
    return {"data": traces, "layout": layout, "height": 280}

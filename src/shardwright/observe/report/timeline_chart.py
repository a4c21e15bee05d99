"""The timeline of a step: predicted above measured, on one axis of time; colours; text made safe.

Kinds of work and waiting have colours of their own (Okabe and Ito's palette, which people of all kinds of
colour vision tell apart); memory has one hue, darker and lighter. Predicted is hatched or dashed, measured is
solid. Colours that begin with ``@`` are the page's, in the light and in the dark.
"""

import html
from collections.abc import Iterator, Sequence
from typing import Any

from shardwright.observe.report.measured import WORK, Span
from shardwright.text import printable


def escape(text: str) -> str:
    """Text that a page shows as it is: no tags, and no characters that turn what is around them.

    >>> escape("<b>\\u202e")
    '&lt;b&gt;\\\\u202e'
    """
    return html.escape(printable(text), quote=True)


LEGEND = {"orientation": "h", "yref": "container", "y": 0, "yanchor": "bottom", "traceorder": "normal"}

Figure = dict[str, Any]
"""``data`` and ``layout`` of plotly.js, and ``height`` in pixels."""

TEXT, BAD = "@text", "@bad"

KIND_COLORS = {
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
KIND_NAMES = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward (I)",
    "weight": "backward (W)",
    "send": "message",
    "wait": "waiting",
    "offload": "copy to the host",
    "load": "copy from the host",
}
LABEL_COLORS = {"forward": "#ffffff", "backward": "#000000", "input": "#000000", "weight": "#000000"}
"""Of the text in the bars of work; the others have none."""

PART_COLORS = {
    "forward": KIND_COLORS["forward"],
    "backward": KIND_COLORS["backward"],
    "imbalance": "#BDBDBD",
    "waiting": KIND_COLORS["wait"],
    "around": "#8C564B",
}
MEMORY_COLORS = {
    "parameters": "#3F2D7D",
    "gradients": "#6A56AE",
    "optimizer": "#8D7CC9",
    "activations": "#B0A3DE",
    "batch": "#CFC7EC",
    "work": "#E4DFF5",
}


def bars(lanes: list[str], starts: list[float], lengths: list[float], color: str) -> dict[str, Any]:
    """Horizontal bars, one for each lane."""
    return {
        "type": "bar",
        "orientation": "h",
        "y": lanes,
        "base": starts,
        "x": lengths,
        "marker": {"color": color, "line": {"width": 0}},
    }


_LANE_PX = 30
_TITLE_PX = 26
_AROUND_PX = 110
_LABEL_PX = 10
_MOST_LABELS = 2000

Half = tuple[str, Sequence[Span], float]
"""One half of the picture: its name, its spans, and the seconds at which it ends."""


def lane(rank: int) -> str:
    """The name of the row of a rank."""
    return f"rank {rank}"


def time_axis(longest_s: float) -> tuple[float, str]:
    """What seconds are multiplied with on an axis of so many, and the unit that makes.

    >>> time_axis(0.4), time_axis(12.0)
    ((1000.0, 'ms'), (1.0, 's'))
    """
    return (1e3, "ms") if longest_s < 1.0 else (1.0, "s")


def timeline_chart(halves: Sequence[Half], ranks: Sequence[int]) -> Figure:
    scale, unit = time_axis(max((end_s for _, _, end_s in halves), default=0.0))
    half_px = _LANE_PX * len(ranks) + _TITLE_PX
    height = half_px * len(halves) + _AROUND_PX
    lanes_share = (half_px - _TITLE_PX) / half_px / len(halves)
    traces: list[dict[str, Any]] = []
    titles: list[dict[str, Any]] = []
    axes: dict[str, Any] = {}
    shown: set[str] = set()
    for index, (name, spans, end_s) in enumerate(halves):
        number = "" if index == 0 else str(index + 1)
        traces += _lanes(name, spans, ranks, end_s, axis=f"y{number}", shown=shown, scale=scale, unit=unit)
        bottom = (len(halves) - 1 - index) / len(halves)
        axes[f"yaxis{number}"] = {
            "domain": [bottom, bottom + lanes_share],
            "autorange": "reversed",
            "fixedrange": True,
            "type": "category",
            "categoryarray": [lane(rank) for rank in ranks],
            "categoryorder": "array",
        }
        titles.append(_title(escape(name), bottom + lanes_share))
    last = "y" if len(halves) < 2 else f"y{len(halves)}"
    layout = {
        "barmode": "overlay",
        "bargap": 0.12,
        "xaxis": {"title": {"text": f"{unit} from the first work"}, "anchor": last, "rangemode": "tozero"},
        **axes,
        "legend": LEGEND,
        "annotations": titles,
        # What does not fit into its bar is left out, and not made smaller.
        "uniformtext": {"mode": "hide", "minsize": _LABEL_PX},
    }
    return {"data": traces, "layout": layout, "height": height}


def _title(text: str, y: float) -> dict[str, Any]:
    """A word above the lanes, at their left end."""
    place = {"xref": "paper", "x": 0, "xanchor": "left", "yref": "paper", "y": y, "yanchor": "bottom"}
    return {**place, "text": text, "showarrow": False}


def _lanes(
    name: str,
    spans: Sequence[Span],
    ranks: Sequence[int],
    end_s: float,
    *,
    axis: str,
    shown: set[str],
    scale: float,
    unit: str,
) -> Iterator[dict[str, Any]]:
    """Idle time as a band behind each lane, and the bars by kind in front of it."""
    idle = bars(
        [lane(rank) for rank in ranks], [0.0] * len(ranks), [end_s * scale] * len(ranks), KIND_COLORS["idle"]
    )
    yield {**idle, **_once("idle", "idle", shown), "hoverinfo": "skip", "yaxis": axis}
    labelled = sum(span.kind in WORK for span in spans) <= _MOST_LABELS
    for kind, title in KIND_NAMES.items():
        own = [span for span in spans if span.kind == kind]
        if not own:
            continue
        trace = bars(
            [lane(span.rank) for span in own],
            [span.start_s * scale for span in own],
            [(span.end_s - span.start_s) * scale for span in own],
            KIND_COLORS[kind],
        )
        if kind == "send":
            trace |= {"width": 0.12, "offset": 0.32}  # at the lower edge of the lane, below the labels
        if kind in ("offload", "load"):
            trace |= {"width": 0.12, "offset": -0.44}  # beside the work, at the upper edge of the lane
        trace |= {"text": [escape(span.name) for span in own], "textposition": "none"}
        if kind in WORK:
            # A hair of the page between two bars of one colour.
            trace["marker"]["line"] = {"width": 1, "color": "@back"}
            if labelled:
                trace |= {"textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
                trace["insidetextfont"] = {"color": LABEL_COLORS[kind]}
        yield {
            **trace,
            **_once(kind, title, shown),
            "hovertemplate": f"%{{text}} on %{{y}}, {escape(name)}<br>"
            f"%{{base:.6g}} {unit} for %{{x:.4g}} {unit}<extra></extra>",
            "yaxis": axis,
        }


def _once(kind: str, title: str, shown: set[str]) -> dict[str, Any]:
    """One entry in the legend for all halves."""
    entry = {"name": title, "legendgroup": kind, "showlegend": kind not in shown}
    shown.add(kind)
    return entry

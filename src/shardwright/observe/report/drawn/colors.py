"""The colours of a report: each means one thing on the whole page.

Kinds of work and waiting have colours of their own (Okabe and Ito's palette, which people of all kinds of
colour vision tell apart); memory has one hue, darker and lighter. Predicted is hatched or dashed, measured is
solid. Colours that begin with ``@`` are the page's, in the light and in the dark.
"""

__all__ = ["BAD", "KIND_COLORS", "KIND_NAMES", "MEMORY_COLORS", "PART_COLORS", "TEXT", "Figure", "bars"]

from typing import Any

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

"""The page of names that others use, and what importing them costs."""

import subprocess
import sys

from shardwright import observe


def test_public_names() -> None:
    assert observe.__all__ == sorted(observe.__all__)
    assert observe.__all__ == [
        "Console",
        "JsonLines",
        "MeasuredEvent",
        "Metric",
        "MetricsLog",
        "Observer",
        "Phase",
        "Progress",
        "Row",
        "RunFolder",
        "RunSummary",
        "StepRecord",
        "bubble",
        "chrome_trace",
        "format_summary",
        "idle_share",
        "measured_events",
        "metrics_of",
        "read_json_lines",
        "summarize",
    ]
    assert all(hasattr(observe, name) for name in observe.__all__)


def test_knows_no_framework() -> None:
    code = "import shardwright.observe, sys; print([m for m in ('torch', 'tensorboard') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

"""Shows and records a run: progress, metrics, timelines. Knows no framework.

::

    front end ──► Observer ──► Console        lines on stderr, from one rank
                     │
                     └───────► RunFolder      config.json plan.json metrics.jsonl events.jsonl trace.json
                                  │
                                  └─► summarize ─► format_summary
"""

from shardwright.observe.console import Console, Phase, Progress
from shardwright.observe.metrics import JsonLines, Metric, MetricsLog, StepRecord, metrics_of, read_json_lines
from shardwright.observe.observer import Observer
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.summary import RunSummary, format_summary, summarize
from shardwright.observe.timeline import MeasuredEvent, Row, chrome_trace, idle_share, measured_events

__all__ = [
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
    "chrome_trace",
    "format_summary",
    "idle_share",
    "measured_events",
    "metrics_of",
    "read_json_lines",
    "summarize",
]

"""Copies of a run's metrics for other tools; ``metrics.jsonl`` is the source."""

from shardwright.observe.trackers.tracker import Run, Tracker

__all__ = ["Run", "Tracker"]

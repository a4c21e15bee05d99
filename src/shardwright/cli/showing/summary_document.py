"""The outcome of a run as a document for programs."""

from dataclasses import asdict
from typing import Any

from shardwright.observe.summary import RunSummary

__all__ = ["summary_document"]


def summary_document(summary: RunSummary) -> dict[str, Any]:
    """The numbers of a summary, with their units in their names, and without its table.

    >>> document = summary_document(RunSummary(steps=3, throughput=8.0, throughput_unit="samples/s"))
    >>> document["samples_per_s"], "stages" in document
    (8.0, False)
    """
    rate = "tokens_per_s" if summary.throughput_unit == "tok/s" else "samples_per_s"
    document = asdict(summary)
    for name in ("stages", "throughput_unit"):
        del document[name]
    document[rate] = document.pop("throughput")
    document[f"{rate}_of_one_process"] = document.pop("single_throughput")
    return document

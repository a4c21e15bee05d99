"""What a run measured, read from its folder: the timeline of a step, metrics of all steps."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwright.errors import UsageError
from shardwright.observe.chrome_trace import MEMORY_IN_USE
from shardwright.observe.jsonl import read_json_lines
from shardwright.observe.metrics import Metric
from shardwright.observe.report.spans import Span

__all__ = ["MeasuredTimeline", "StepMetrics", "read_metrics", "read_timeline"]

_CATEGORIES = {
    "forward": "forward",
    "backward": "backward",
    "backward input": "input",
    "backward weight": "weight",
    "transfer": "send",
    "wait": "wait",
}
_GIB = 2**30
_MOST_RANKS = 1_000_000


@dataclass(frozen=True, slots=True)
class MeasuredTimeline:
    """The measured half of ``trace.json``.

    Attributes:
        step: which step it is of; None where the file does not say.
        spans: what each pipeline rank did, seconds from the start of the first work.
        memory: of each pipeline rank, (seconds, bytes in use); empty where nobody looked.
    """

    step: int | None
    spans: tuple[Span, ...]
    memory: Mapping[int, tuple[tuple[float, float], ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """One line of ``metrics.jsonl``; None where a figure is not known.

    Attributes:
        step: number of the step.
        loss: mean over the batch; None also where it is no number.
        step_s: seconds that the step took.
        peak_bytes: peak memory of each world rank so far.
        limit_bytes: memory that a rank may use.
    """

    step: int
    loss: float | None
    step_s: float | None
    update_s: float | None
    peak_bytes: tuple[float, ...]
    limit_bytes: float | None


def read_metrics(path: Path) -> tuple[StepMetrics, ...]:
    """All steps, in order; none where the file is not there.

    Raises:
        UsageError: a line holds something that is no metric; the message names line and field.
    """
    if not path.exists():
        return ()
    found: dict[int, StepMetrics] = {}
    for number, record in enumerate(read_json_lines(path), start=1):
        where = f"{path}, record {number}"
        step = record.get("step")
        if not isinstance(step, int):
            raise UsageError(f"{where}: step is {step!r}, but it must be a whole number. {_FOREIGN}")
        peaks = record.get(Metric.MEMORY_BY_RANK, [])
        if not isinstance(peaks, list):
            raise UsageError(
                f"{where}: {Metric.MEMORY_BY_RANK} is {peaks!r}, but it must be a list. {_FOREIGN}"
            )
        limit_gib = _number(record, Metric.MEMORY_LIMIT, where)
        # A step that was done again after a restart counts as it was done last.
        found[step] = StepMetrics(
            step=step,
            loss=_number(record, Metric.LOSS, where),
            step_s=_number(record, Metric.STEP, where),
            update_s=_number(record, Metric.UPDATE, where),
            peak_bytes=tuple(_as_number(peak, Metric.MEMORY_BY_RANK, where) * _GIB for peak in peaks),
            limit_bytes=None if limit_gib is None else limit_gib * _GIB,
        )
    return tuple(found[step] for step in sorted(found))


def read_timeline(path: Path) -> MeasuredTimeline | None:
    """The measured timeline; None where the file is not there or holds none.

    Raises:
        UsageError: the file is damaged or of something else; the message names the field.
    """
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}). {_FOREIGN}") from error
    events = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise UsageError(f"{path}: traceEvents must be a list of objects. {_FOREIGN}")
    threads = {
        _thread(event)
        for event in events
        if event.get("name") == "thread_name" and _arguments(event).get("name") == "measured"
    }
    pids = {pid: 0 for pid, _ in map(_thread, events) if any(pid == known for known, _ in threads)}
    order = {
        _thread(event)[0]: _arguments(event).get("sort_index")
        for event in events
        if event.get("name") == "process_sort_index"
    }
    rank_of = {pid: _rank(order.get(pid), path) for pid in pids}
    spans = [
        _span(event, number, rank_of, path)
        for number, event in enumerate(events)
        if event.get("ph") == "X" and _thread(event) in threads
    ]
    other = document.get("otherData")
    step = other.get("step") if isinstance(other, dict) else None
    if not spans:
        return None
    memory = _memory(events, rank_of, path)
    return MeasuredTimeline(step if isinstance(step, int) else None, tuple(spans), memory)


_FOREIGN = "The file was damaged, or something else wrote it: remove it, or name another run."


def _thread(event: Mapping[str, Any]) -> tuple[str, str]:
    """Of an event; as text, which anything that a file may hold has."""
    return repr(event.get("pid")), repr(event.get("tid"))


def _arguments(event: Mapping[str, Any]) -> Mapping[str, Any]:
    found = event.get("args")
    return found if isinstance(found, dict) else {}


def _rank(value: Any, path: Path) -> int:
    number = _as_number(value, "sort_index", str(path))
    if not 0 <= number <= _MOST_RANKS:
        raise UsageError(f"{path}: sort_index is {value!r}, but it must be a rank. {_FOREIGN}")
    return int(number)


def _span(event: Mapping[str, Any], number: int, rank_of: Mapping[Any, int], path: Path) -> Span:
    where = f"{path}, traceEvents.{number}"
    start_us, length_us = (_finite(event.get(key), key, where) for key in ("ts", "dur"))
    category = event.get("cat")
    if not isinstance(category, str) or category not in _CATEGORIES:
        raise UsageError(f"{where}: cat is {category!r}, but it must be one of {', '.join(_CATEGORIES)}.")
    kind = _CATEGORIES[category]
    return Span(
        rank=rank_of[_thread(event)[0]],
        kind=kind,
        start_s=start_us / 1e6,
        end_s=(start_us + length_us) / 1e6,
        name=str(event.get("name", "")),
    )


def _memory(
    events: Sequence[Mapping[str, Any]], rank_of: Mapping[Any, int], path: Path
) -> dict[int, tuple[tuple[float, float], ...]]:
    """What was in use, by rank, in order of time."""
    found: dict[int, list[tuple[float, float]]] = {}
    for number, event in enumerate(events):
        pid = _thread(event)[0]
        if event.get("ph") == "C" and event.get("name") == MEMORY_IN_USE and pid in rank_of:
            where = f"{path}, traceEvents.{number}"
            moment = _finite(event.get("ts"), "ts", where) / 1e6
            num_bytes = _finite(_arguments(event).get("bytes"), "bytes", where)
            found.setdefault(rank_of[pid], []).append((moment, num_bytes))
    return {rank: tuple(sorted(found[rank])) for rank in sorted(found)}


def _number(record: Mapping[str, Any], name: str, where: str) -> float | None:
    value = record.get(name)
    if value is None:
        return None
    number = _as_number(value, name, where)
    return number if math.isfinite(number) else None


def _finite(value: Any, name: str, where: str) -> float:
    number = _as_number(value, name, where)
    if not math.isfinite(number):
        raise UsageError(f"{where}: {name} is {number}, but it must be finite. {_FOREIGN}")
    return number


def _as_number(value: Any, name: str, where: str) -> float:
    try:
        # float() also reads "NaN" and "Infinity", which is how JsonLines writes them.
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{where}: {name} is {value!r}, but it must be a number. {_FOREIGN}") from error

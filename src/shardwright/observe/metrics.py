"""The metrics of a step, and their files: names, one JSON object per line, numbers read with care.

Every name is ``group/name(unit)``; a share is a number from 0 to 1.
"""

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO

from shardwright.errors import UsageError
from shardwright.files import DocumentError, UserFile, open_to_append, parse_json
from shardwright.text import shown

_MOST_BYTES = 2 * 2**30  # millions of steps


class JsonLines:
    """Appends records to a file; each is in the file as soon as `append` returns.

    The file is made by the first record. A record that a killed process left unfinished is closed with a
    line break, so that it spoils no record but itself.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file: BinaryIO | None = None

    def append(self, record: Mapping[str, Any]) -> None:
        line = json.dumps(_plain(record), allow_nan=False, default=str)
        if self._file is None:
            self._file = _open(self.path)
        self._file.write(f"{line}\n".encode())
        self._file.flush()

    def close(self) -> None:
        """Closes the file; a later `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


class Records(list[dict[str, Any]]):
    """The records of a file, in order.

    Attributes:
        left_out: one sentence about lines that are no record; empty where all are. The last line does not
            count: the run that writes it goes on, or was killed.
    """

    left_out: str = ""


def read_json_lines(path: str | os.PathLike[str]) -> Records:
    file = UserFile(path, what="", error=UsageError, most_bytes=_MOST_BYTES)
    records, bad, first = Records(), 0, ""
    lines = enumerate(file.read_lines(), start=1)
    number, line = next(lines, (0, b""))
    while number:
        following = next(lines, (0, b""))
        try:
            record = parse_json(line.decode(errors="replace"), free_text=True)
            if not isinstance(record, dict):
                raise DocumentError("it is no object")
            records.append(record)
        except DocumentError as error:
            if line.strip() and following[0]:
                bad, first = bad + 1, first or f"line {number} {error.predicate}"
        number, line = following
    if bad:
        more = "" if bad == 1 else f", and {bad - 1} others are none either"
        records.left_out = f"{file}: {first}{more}. Left out."
    return records


def _open(path: Path) -> BinaryIO:
    unfinished = _ends_inside_a_line(path)
    file = open_to_append(path)
    if unfinished:
        file.write(b"\n")
    return file


def _ends_inside_a_line(path: Path) -> bool:
    if not path.is_file() or not path.stat().st_size:
        return False
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() != b"\n"


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else f"{'-' if value < 0 else ''}Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


FOREIGN = "The file was damaged, or something else wrote it: remove it, or name another run."


def number_or_none(record: Mapping[str, Any], name: str, where: str) -> float | None:
    """A number of a record; None where it has none, or has NaN or infinity."""
    value = record.get(name)
    number = None if value is None else to_number(value, name, where)
    return number if number is not None and math.isfinite(number) else None


def to_number(value: Any, name: str, where: str) -> float:
    """A number that must be there, also one of those that JSON does not have."""
    try:
        if isinstance(value, bool):
            raise TypeError
        # float() also reads "NaN" and "Infinity", which is how JsonLines writes them.
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"{where}: {name} is {shown(value)}, but it must be a number. {FOREIGN}") from error


_GIB = 2**30

MetricValue = float | list[float]
"""A number, or one a rank."""


class Metric(StrEnum):
    """Names in ``metrics.jsonl``.

    Throughput and compute are those of the whole job. ``COMPUTE`` counts the FLOPs of the model: what is
    recomputed does not count. ``ABOVE_PREDICTION`` is measured / predicted - 1: positive where the plan was
    too hopeful. ``WORK`` is that of all ranks of a replica, added up: more than a step where they share it.
    ``UPDATE`` is the optimizer's, before the step. Those of ``goodput`` are of the run so far, at most once a
    second: see `shardwright.observe.goodput`.
    """

    UNIX = "time/unix(s)"
    LOSS = "train/loss"
    LEARNING_RATE = "train/learning_rate"
    STEP = "time/step(s)"
    STEP_PREDICTED = "time/step_predicted(s)"
    WORK = "time/work(s)"
    OUTSIDE = "time/outside_units(s)"
    UPDATE = "time/update(s)"
    SKIPPED = "train/skipped(updates)"
    ABOVE_PREDICTION = "time/above_prediction(share)"
    SAMPLES = "throughput/samples(1/s)"
    TOKENS = "throughput/tokens(1/s)"
    COMPUTE = "throughput/compute(FLOP/s)"
    COMPUTE_PER_RANK = "throughput/compute_per_rank(FLOP/s)"
    MEMORY = "memory/peak(GiB)"
    MEMORY_BY_RANK = "memory/peak_by_rank(GiB)"
    MEMORY_LIMIT = "memory/limit(GiB)"
    SLOW_RANK = "ranks/slow(rank)"
    SLOW = "ranks/slow(s)"
    BUBBLE = "pipeline/bubble(share)"
    BUBBLE_PREDICTED = "pipeline/bubble_predicted(share)"
    PRODUCTIVE_SHARE = "goodput/productive(share)"
    PRODUCTIVE = "goodput/productive(s)"
    ELAPSED = "goodput/elapsed(s)"
    STARTS = "goodput/starts(s)"
    SAVES = "goodput/saves(s)"
    WAITS = "goodput/waits(s)"
    LOST = "goodput/lost(s)"
    LOST_STEPS = "goodput/lost(steps)"
    RESTARTS = "goodput/restarts(count)"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The measurements of one step; None where unknown.

    Attributes:
        samples: samples in the batches of all replicas.
        tokens: tokens in the batches of all replicas.
        flops: FLOPs of the model in forward and backward, all ranks together, recomputation not counted.
        bubble_measured: idle share of the ranks' time, 0 to 1.
        bubble_predicted: the same, as the plan expects it.
        step_predicted_s: seconds of a step, as the plan expects them.
        work_s: seconds for which the ranks of the replica that writes worked, all of them together.
        outside_s: seconds of operations of the step function that rest on no unit of the model, on the rank
            that writes: every rank of a pipeline runs them.
        update_s: seconds of the optimizer's update before the step, on the rank that writes.
        slow_rank: the rank that the others waited for, by `Stragglers`, and for how many seconds.
        skipped_updates: how many were left out so far, as gradients were not finite.
    """

    step: int
    seconds: float
    samples: int
    loss: float | None = None
    tokens: int | None = None
    flops: float | None = None
    bubble_measured: float | None = None
    bubble_predicted: float | None = None
    step_predicted_s: float | None = None
    memory_bytes: tuple[float, ...] | None = None
    memory_limit_bytes: int | None = None
    learning_rate: float | None = None
    work_s: float | None = None
    outside_s: float | None = None
    update_s: float | None = None
    skipped_updates: int | None = None
    slow_rank: int | None = None
    slow_s: float | None = None


_AS_RECORDED = {
    Metric.LOSS: "loss",
    Metric.LEARNING_RATE: "learning_rate",
    Metric.STEP: "seconds",
    Metric.STEP_PREDICTED: "step_predicted_s",
    Metric.WORK: "work_s",
    Metric.OUTSIDE: "outside_s",
    Metric.UPDATE: "update_s",
    Metric.SKIPPED: "skipped_updates",
    Metric.SLOW_RANK: "slow_rank",
    Metric.SLOW: "slow_s",
    Metric.BUBBLE: "bubble_measured",
    Metric.BUBBLE_PREDICTED: "bubble_predicted",
}
"""Metrics that a record has under another name; the others are worked out."""


def metrics_of(record: StepRecord, *, world_size: int) -> dict[str, MetricValue]:
    """The metrics of a step; unknown ones are left out.

    >>> metrics = metrics_of(StepRecord(step=1, seconds=0.5, samples=8, loss=2.0), world_size=2)
    >>> {str(name): value for name, value in metrics.items()}
    {'train/loss': 2.0, 'time/step(s)': 0.5, 'throughput/samples(1/s)': 16.0}
    """
    seconds = record.seconds
    found: dict[str, MetricValue | None] = {
        metric: getattr(record, name) for metric, name in _AS_RECORDED.items()
    }
    if seconds > 0:
        if record.step_predicted_s:
            found[Metric.ABOVE_PREDICTION] = seconds / record.step_predicted_s - 1.0
        found[Metric.SAMPLES] = record.samples / seconds
        if record.tokens is not None:
            found[Metric.TOKENS] = record.tokens / seconds
        if record.flops is not None:
            found[Metric.COMPUTE] = record.flops / seconds
            found[Metric.COMPUTE_PER_RANK] = record.flops / seconds / world_size
    if record.memory_bytes:
        found[Metric.MEMORY] = max(record.memory_bytes) / _GIB
        found[Metric.MEMORY_BY_RANK] = [num_bytes / _GIB for num_bytes in record.memory_bytes]
    if record.memory_limit_bytes is not None:
        found[Metric.MEMORY_LIMIT] = record.memory_limit_bytes / _GIB
    return {name: value for name, value in found.items() if value is not None}


def record_of(line: Mapping[str, Any], where: str) -> StepRecord:
    """The measurements in a line of the file; what is not there, or is no number, is unknown, or 0."""
    step, peaks = line.get("step"), line.get(Metric.MEMORY_BY_RANK, [])
    if not isinstance(step, int) or isinstance(step, bool):
        raise UsageError(f"{where}: step is {shown(step)}, but it must be a whole number. {FOREIGN}")
    where = f"{where}, step {step}"
    if not isinstance(peaks, list):
        raise UsageError(
            f"{where}: {Metric.MEMORY_BY_RANK} is {shown(peaks)}, but it must be a list. {FOREIGN}"
        )

    found_bytes = [to_number(peak, Metric.MEMORY_BY_RANK, where) * _GIB for peak in peaks]

    def read(metric: Metric, *, times: float = 1.0) -> Any:
        number = number_or_none(line, metric, where)
        return None if number is None else number * times

    known = {name: read(metric) for metric, name in _AS_RECORDED.items()}
    known |= {name: int(known[name]) for name in ("slow_rank", "skipped_updates") if known[name] is not None}
    seconds = known["seconds"] or 0.0
    if line.get(Metric.LOSS) is not None:
        known["loss"] = to_number(line[Metric.LOSS], Metric.LOSS, where)
    return StepRecord(
        **{**known, "seconds": seconds},
        step=step,
        samples=read(Metric.SAMPLES, times=seconds) or 0,
        tokens=read(Metric.TOKENS, times=seconds),
        flops=read(Metric.COMPUTE, times=seconds),
        memory_bytes=tuple(num_bytes if math.isfinite(num_bytes) else 0.0 for num_bytes in found_bytes),
        memory_limit_bytes=read(Metric.MEMORY_LIMIT, times=_GIB),
    )


class MetricsLog:
    """Appends one line a step to ``metrics.jsonl``.

    A line holds ``step``, ``time/unix(s)`` (when it was written) and what `metrics_of` knows. Lines of an
    earlier run stay if this one resumes from it. If it begins anew, at step 1, their file is kept under
    another name, ``metrics-1.jsonl``: two runs never mix.

    Attributes:
        kept: the file with the metrics of an earlier run; None where there was none.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, world_size: int, wall: Callable[[], float] = time.time
    ) -> None:
        self._lines = JsonLines(path)
        self._world_size = world_size
        self._wall = wall
        self._is_first = True
        self.kept: Path | None = None

    def append(self, record: StepRecord, further: Mapping[str, float] | None = None) -> None:
        if self._is_first and record.step == 1:
            self.kept = _kept(self._lines.path)
        self._is_first = False
        metrics = metrics_of(record, world_size=self._world_size)
        now_s = round(self._wall(), 3)
        self._lines.append({"step": record.step, Metric.UNIX: now_s, **metrics, **(further or {})})

    def close(self) -> None:
        self._lines.close()


def read_steps(path: Path) -> Records:
    """The lines of the steps of a run, each step once.

    A run that was killed has done steps after its last checkpoint, and does them again when it resumes: the
    later line holds.
    """
    if not path.exists():
        return Records()
    return _each_once(read_json_lines(path))


_FIRST_BYTES, _LAST_BYTES = 2**14, 2**19
"""Of a long file; the last ones are those of a thousand steps or so."""


def read_first_and_last(path: Path) -> Records:
    """The lines of the steps of a run; of a long file, the first line and the last ones alone."""
    if not path.is_file() or path.stat().st_size <= _FIRST_BYTES + _LAST_BYTES:
        return read_steps(path)
    with path.open("rb") as file:
        first = next(iter(_parsed(file.read(_FIRST_BYTES).split(b"\n")[:1])), None)
    return _each_once(Records([*([] if first is None else [first]), *read_last(path)]))


def read_last(path: Path, *, most_bytes: int = _LAST_BYTES, having: bytes = b"") -> list[dict[str, Any]]:
    """The last records of a file, or those of them that have some text; lines that are none are left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:  # asking first is not enough: another rank may delete the folder meanwhile
        return []
    with file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - most_bytes))
        lines = file.read(most_bytes).split(b"\n")
    return list(_parsed(line for line in lines[size > most_bytes :] if having in line))


def _parsed(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    for line in lines:
        with suppress(DocumentError):
            record = parse_json(line.decode(errors="replace"), free_text=True)
            if isinstance(record, dict):
                yield record


def _each_once(records: Records) -> Records:
    steps = Records()
    steps.left_out = records.left_out
    for record in records:
        while steps and _comes_before(record, steps[-1]):
            steps.pop()
        steps.append(record)
    return steps


def _comes_before(record: dict[str, Any], earlier: dict[str, Any]) -> bool:
    """Whether a line tells of a step that the earlier line tells of too, or of one before."""
    step, last = record.get("step"), earlier.get("step")
    return isinstance(step, int | float) and isinstance(last, int | float) and step <= last


def _kept(path: Path) -> Path | None:
    """Moves the metrics of an earlier run out of the way; returns where to."""
    if not path.is_file() or not path.stat().st_size:
        return None
    number = 1
    while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    return path.rename(kept)

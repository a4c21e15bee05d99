"""The console of a run: lines on stderr from one rank, and the progress line.

Results go to stdout, progress to stderr. ``-q`` (``SHARDWRIGHT_QUIET=1``) silences progress. Only a terminal
gets colour and lines rewritten in place; ``NO_COLOR`` turns off the first, ``CI`` the second. A launcher
that passes the output of ranks on to a terminal says so (``SHARDWRIGHT_TERMINAL=1``).

::

    step 120 | loss 3.2145 | 41.2k tok/s | 18.4 TFLOP/s/rank | mem 3.1/24 GiB | bubble 11% | eta 00:12

Unknown values are left out; the order and the words stay, so that scripts can rely on them.
"""

import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TextIO

from shardwright.observe.metrics import StepRecord
from shardwright.quantities import format_count, format_seconds
from shardwright.text import cut, folded, printable

_PATIENCE_S = 2.0
_BETWEEN_PARTS_S = 10.0
_DIM, _RESET = "\x1b[2m", "\x1b[0m"
_CLEAR_LINE = "\x1b[K"


class Console:
    """Writes progress.

    Attributes:
        rewrites: whether lines can be rewritten in place.

    >>> console = Console(stream=sys.stdout, environ={})
    >>> console.status("joining 2 ranks")
    joining 2 ranks
    """

    def __init__(
        self,
        *,
        prints: bool = True,
        stream: TextIO | None = None,
        environ: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream
        self._clock = clock
        self._live_line = False
        self.prints = prints and not _is_set(environ, "SHARDWRIGHT_QUIET")
        self._is_terminal = self._target.isatty()
        terminal = self._is_terminal or _is_set(environ, "SHARDWRIGHT_TERMINAL")
        terminal = terminal and environ.get("TERM") != "dumb"
        # NO_COLOR counts with any value but the empty one (no-color.org).
        self._color = terminal and not environ.get("NO_COLOR")
        self.rewrites = terminal and not _is_set(environ, "CI")

    def line(self, text: str) -> None:
        """Prints text, of one line or several; folded to the width of a terminal that gets it directly."""
        if self.prints:
            self._write(f"{self._fold(printable(text, lines=True))}\n")

    def status(self, text: str) -> None:
        if self.prints:
            self._write(f"{self._dim(self._fold(text))}\n")

    @contextmanager
    def phase(self, text: str) -> Iterator["Phase"]:
        """Says at once what begins, and at the end how long it took if it took longer than 2 s.

        >>> console = Console(stream=sys.stdout, environ={})
        >>> with console.phase("tracing the model"):
        ...     pass
        tracing the model ...
        """
        start = self._clock()
        self.status(f"{text} ...")
        phase = Phase(self, text, self._clock)
        done = False
        try:
            yield phase
            done = True
        finally:
            self._end_live_line()
            elapsed_s = self._clock() - start
            if elapsed_s > _PATIENCE_S:
                verb = "" if done else "stopped after "
                self.status(f"{text}: {verb}{format_seconds(elapsed_s)}")

    def rewrite(self, text: str) -> bool:
        """Replaces the last rewritten line; returns False where lines cannot be rewritten."""
        if self.prints and self.rewrites:
            if self._is_terminal:  # what a terminal continues in the next line stays there
                text = cut(text, shutil.get_terminal_size().columns - 1)
            self._write(f"{self._dim(text)}\r")  # whatever is written next replaces it
            self._live_line = True
        return self.rewrites

    @property
    def _target(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stderr

    def _fold(self, text: str) -> str:
        return folded(text, shutil.get_terminal_size().columns) if self._is_terminal else text

    def _dim(self, text: str) -> str:
        text = printable(text, lines=True)
        return f"{_DIM}{text}{_RESET}" if self._color else text

    def _end_live_line(self) -> None:
        if self._live_line:
            self._write("")

    def _write(self, text: str) -> None:
        # One write a line: ranks of a node that share a stderr do not tear each other's lines.
        self._target.write((_CLEAR_LINE if self._live_line else "") + text)
        self._target.flush()
        self._live_line = False


class Phase:
    """A phase that is under way; made by `Console.phase`."""

    def __init__(self, console: Console, text: str, clock: Callable[[], float]) -> None:
        self._console = console
        self._text = text
        self._clock = clock
        self._said_at = clock()

    def update(self, done: int, *, total: int) -> None:
        """Shows how far it is, ``measuring units 3/12``: in place on a terminal, else every 10 s."""
        text = f"{self._text} {done}/{total}"
        if self._console.rewrite(text):
            return
        now = self._clock()
        if now - self._said_at >= _BETWEEN_PARTS_S:
            self._said_at = now
            self._console.status(text)


def _is_set(environ: Mapping[str, str], name: str) -> bool:
    return environ.get(name, "").lower() not in ("", "0", "false", "no")


_UPDATE_S, _LINE_S = 0.5, 10.0
"""Between two updates of the line on a terminal; between two lines elsewhere."""


class Progress:
    """Prints one line for the first step, then one every so often, averaged over the steps since the last.

    On a terminal the last line is updated in place; elsewhere a line comes each ten seconds. A log interval
    asks for a line each so many steps instead. The first step stands alone because it does what later steps
    do not: it traces, plans and places. So it tells nothing about the time of arrival.
    """

    def __init__(
        self,
        console: Console,
        *,
        log_interval: int | None,
        world_size: int,
        total_steps: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total_steps = total_steps
        self._console = console
        self._log_interval = log_interval
        self._world_size = world_size
        self._clock = clock
        self._first = True
        self._interval: _Interval | None = None
        self._interval_start = 0.0

    def step_done(self, record: StepRecord) -> None:
        """Counts a step, and prints a line when one is due."""
        if self._interval is None:
            self._interval = _Interval()
        self._interval.add(record)
        if self._first or self._is_due(record.step):
            self.flush(for_good=self._first or self._log_interval is not None)

    def _is_due(self, step: int) -> bool:
        if self._log_interval is not None:
            return step % self._log_interval == 0
        pause_s = _UPDATE_S if self._console.rewrites else _LINE_S
        return self._clock() - self._interval_start >= pause_s

    def flush(self, *, for_good: bool = True) -> None:
        """Prints the line of the steps since the last one, if there are any."""
        interval, now = self._interval, self._clock()
        if interval is None:
            return
        parts = _parts(interval, self._world_size)
        if self._total_steps is not None and not self._first:
            # By the clock on the wall, not by the steps' own seconds: loading data and saving take time too.
            step_s = (now - self._interval_start) / interval.steps
            parts.append(f"eta {_format_eta(max(0, self._total_steps - interval.last_step) * step_s)}")
        text = " | ".join(parts)
        if for_good or not self._console.rewrite(text):
            self._console.line(text)
        self._interval, self._interval_start, self._first = None, now, False


@dataclass(slots=True)
class _Interval:
    """Sums over the steps of an interval; a sum is None once a step did not know its part."""

    steps: int = 0
    last_step: int = 0
    seconds: float = 0.0
    samples: int = 0
    losses: int = 0
    loss: float = 0.0
    tokens: float | None = 0.0
    flops: float | None = 0.0
    bubble_s: float | None = 0.0
    memory_bytes: float = 0
    memory_limit_bytes: int | None = None

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.last_step = record.step
        self.seconds += record.seconds
        self.samples += record.samples
        if record.loss is not None:
            self.losses += 1
            self.loss += record.loss
        self.tokens = _sum(self.tokens, record.tokens)
        self.flops = _sum(self.flops, record.flops)
        idle = record.bubble_measured
        self.bubble_s = _sum(self.bubble_s, None if idle is None else idle * record.seconds)
        self.memory_bytes = max(self.memory_bytes, *(record.memory_bytes or ()), 0)
        self.memory_limit_bytes = record.memory_limit_bytes


def _sum(total: float | None, part: float | None) -> float | None:
    return None if total is None or part is None else total + part


def _parts(interval: _Interval, world_size: int) -> list[str]:
    parts = [f"step {interval.last_step}"]
    if interval.losses:
        parts.append(f"loss {format_loss(interval.loss / interval.losses)}")
    if interval.seconds > 0:
        if interval.tokens is not None:
            parts.append(f"{format_rate(interval.tokens / interval.seconds)} tok/s")
        elif interval.samples:  # none are known of a batch that is one whole, such as a graph
            parts.append(f"{format_rate(interval.samples / interval.seconds)} samples/s")
        if interval.flops is not None:
            parts.append(f"{_format_flops(interval.flops / interval.seconds / world_size)}/s/rank")
    if interval.memory_bytes:
        parts.append(f"mem {_format_memory(interval.memory_bytes, interval.memory_limit_bytes)}")
    if interval.bubble_s is not None and interval.seconds > 0:
        parts.append(f"bubble {interval.bubble_s / interval.seconds:.0%}")
    return parts


def format_loss(loss: float) -> str:
    """Four decimals; powers of ten where they would not show it.

    >>> format_loss(3.21451), format_loss(0.00002), format_loss(float("nan"))
    ('3.2145', '2.000e-05', 'nan')
    """
    if loss == 0 or not math.isfinite(loss) or 1e-3 <= abs(loss) < 1e6:
        return f"{loss:.4f}"
    return f"{loss:.3e}"


def format_rate(rate: float) -> str:
    """Things a second, with three figures.

    >>> format_rate(41_234), format_rate(512.4), format_rate(0.5321)
    ('41.2k', '512', '0.53')
    """
    return format_count(rate) if rate >= 999.5 else _three_figures(rate)


def _format_flops(flops: float) -> str:
    for power, unit in ((12, "TFLOP"), (9, "GFLOP"), (6, "MFLOP"), (3, "kFLOP")):
        if flops >= 10**power:
            return f"{_three_figures(flops / 10**power)} {unit}"
    return f"{flops:.0f} FLOP"


def _format_memory(num_bytes: float, limit_bytes: int | None) -> str:
    # In GiB down to a tenth, which is what one decimal can show.
    scale, unit = (2**30, "GiB") if num_bytes >= 0.1 * 2**30 else (2**20, "MiB")
    of = "" if limit_bytes is None else f"/{_short(limit_bytes / scale)}"
    return f"{_short(num_bytes / scale)}{of} {unit}"


def _short(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _format_eta(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


def _three_figures(value: float) -> str:
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"

"""Times contestants against one another: in turns, so that a busy machine hits all of them alike.

::

    round 0    peer   ours         each time: from the first rank that starts
    round 1    ours   peer                    to the last that ends

Every time comes with what other processes took of the machine meanwhile. A run in which that is much is
disturbed: it is run again while `Patience` lasts, and left out of the median if at least half are quiet.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

__all__ = ["QUIET_CORES", "Patience", "Run", "Times", "alternate", "clocked", "ratios"]

QUIET_CORES = 0.1
"""A run is quiet if others keep less than this many cores busy meanwhile."""

Run = tuple[float, float]
"""Seconds, and cores that others kept busy meanwhile."""

_STILL_S = 0.3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Times:
    """Seconds of one contestant, run by run.

    Attributes:
        seconds: of each run.
        foreign: for each run, cores that processes other than the ranks kept busy.
        by_round: the run of each round that was not repeated.
    """

    seconds: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    by_round: list[Run] = field(default_factory=list)

    def add(self, other: "Times") -> None:
        """Takes the runs of another race of the same contestant, too."""
        self.seconds += other.seconds
        self.foreign += other.foreign
        self.by_round += other.by_round

    @property
    def quiet(self) -> list[float]:
        """The runs of rounds in which others hardly took anything."""
        return [seconds for seconds, foreign in self.by_round if foreign < QUIET_CORES]

    @property
    def disturbed(self) -> bool:
        """Less than half of the rounds were quiet, so all count: a few are known less well than many."""
        return 2 * len(self.quiet) < len(self.by_round)

    @property
    def counted(self) -> list[float]:
        """The quiet runs if at least half were quiet, else all; without those that were repeated."""
        return [seconds for seconds, _ in self.by_round] if self.disturbed else self.quiet

    @property
    def median_s(self) -> float:
        """Of the runs that count."""
        return statistics.median(self.counted)

    @property
    def spread(self) -> float:
        """Interquartile range of the runs that count, relative to their median."""
        if len(self.counted) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.counted, n=4, method="inclusive")
        return (high - low) / self.median_s


class Patience:
    """Seconds that may go to waiting for a quiet machine and to runs that were disturbed."""

    def __init__(self, limit_s: float):
        self._left_s = limit_s

    @property
    def ended(self) -> bool:
        """Nothing is left."""
        return self._left_s <= 0

    def wait(self) -> None:
        """Returns when the machine is idle, or when nothing is left."""
        start = time.monotonic()
        still_s = 0.0
        while still_s < _STILL_S and time.monotonic() - start < self._left_s:
            busy, began = _busy_s(), time.monotonic()
            time.sleep(0.1)
            passed_s = time.monotonic() - began
            still_s = still_s + passed_s if (_busy_s() - busy) / passed_s < 2 * QUIET_CORES else 0.0
        self.spend(time.monotonic() - start)

    def spend(self, seconds: float) -> None:
        """Takes some away."""
        self._left_s -= seconds


def alternate(
    contestants: Mapping[str, Callable[[], Run]],
    *,
    rounds: int,
    patience: Patience | None = None,
    warm_up: int = 1,
) -> dict[str, Times]:
    """Runs every contestant in every round, in the opposite order in every other one.

    Args:
        contestants: what gives each a turn; a turn may take longer than the seconds that it tells.
        rounds: how many quiet runs are wanted of each.
        patience: for that; None takes every run.
        warm_up: runs of each before those.
    """
    patience = patience or Patience(0.0)
    times = {name: Times() for name in contestants}
    for _ in range(warm_up):
        for run in contestants.values():
            run()
    for number in range(rounds):
        for name, run in list(contestants.items())[:: -1 if number % 2 else 1]:
            while True:
                if not patience.ended:
                    patience.wait()
                began = time.monotonic()
                seconds, foreign = run()
                times[name].seconds.append(seconds)
                times[name].foreign.append(foreign)
                if foreign < QUIET_CORES or patience.ended:
                    times[name].by_round.append((seconds, foreign))
                    break
                patience.spend(time.monotonic() - began)
    return times


def ratios(ours: Times, rival: Times) -> list[float]:
    """Ours / rival, round by round: of those in which both were quiet, if these are at least half; else all.

    What slows the machine for seconds hits both of a round, so these vary less than their parts.
    """
    rounds = list(zip(ours.by_round, rival.by_round, strict=True))
    quiet = [(a, b) for a, b in rounds if a[1] < QUIET_CORES and b[1] < QUIET_CORES]
    return [a / b for (a, _), (b, _) in (quiet if 2 * len(quiet) >= len(rounds) else rounds)]


def clocked(run: Callable[[], object], *, times: int = 1) -> Run:
    """Runs something on all ranks, so often, and tells what it takes once; collective, equal on all ranks."""
    dist.barrier()
    busy, own, start = _busy_s(), time.process_time(), time.perf_counter()
    for _ in range(times):
        run()
    mine = (start, time.perf_counter(), time.process_time() - own, busy, _busy_s())
    gathered: list[tuple[float, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    # The clock is one for all processes of a host.
    starts, ends, own_s, busy_before, busy_after = zip(*gathered, strict=True)
    seconds = max(ends) - min(starts)
    # The machine's own count comes in ticks of 10 ms for each core: too coarse for short runs.
    foreign = (max(busy_after) - min(busy_before) - sum(own_s)) / max(seconds, 0.1)
    return seconds / times, max(0.0, foreign)


def _busy_s() -> float:
    """Seconds that all cores of this machine have worked, for whomever."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S

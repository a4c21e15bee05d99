"""Times contestants against one another: in turns, so that a busy machine hits all of them alike.

::

    round 0    barrier  peer   barrier  ours         each time: from the first rank that starts
    round 1    barrier  peer   barrier  ours                    to the last that ends

Every time comes with what other processes took of the machine meanwhile. Rounds in which that is much are
run again, a limited number of times, and left out of the medians where enough quiet ones remain.
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

__all__ = ["QUIET_CORES", "Times", "alternate", "foreign_cores", "wait_for_quiet"]

QUIET_CORES = 0.1
"""A round is quiet if others keep less than this many cores busy in each of its runs."""

_FEWEST_QUIET = 3
_STILL_S = 4
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Times:
    """Seconds of one contestant, round by round.

    Attributes:
        seconds: of each round.
        foreign: for each round, cores that processes other than the ranks kept busy.
        quiet: for each round, whether it was quiet for all contestants.
    """

    seconds: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)
    quiet: list[bool] = field(default_factory=list)

    @property
    def counted(self) -> list[float]:
        """The quiet rounds where there are a few, else all."""
        if sum(self.quiet) < _FEWEST_QUIET:
            return self.seconds
        return [s for s, quiet in zip(self.seconds, self.quiet, strict=True) if quiet]

    @property
    def disturbed(self) -> bool:
        """Too few rounds were quiet, so all count."""
        return sum(self.quiet) < min(_FEWEST_QUIET, len(self.quiet))

    @property
    def median_s(self) -> float:
        """Of the rounds that count."""
        return statistics.median(self.counted)

    @property
    def spread(self) -> float:
        """Interquartile range of the rounds that count, relative to their median."""
        if len(self.counted) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.counted, n=4, method="inclusive")
        return (high - low) / self.median_s


def alternate(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, most_rounds: int = 0, warm_up: int = 1
) -> dict[str, Times]:
    """Runs every contestant in every round; collective over all ranks, the same result on each.

    Args:
        contestants: what each rank calls.
        rounds: how many quiet rounds are wanted.
        most_rounds: how many rounds are run at most to get them.
        warm_up: rounds before those.
    """
    times = {name: Times() for name in contestants}
    for number in range(-warm_up, max(rounds, most_rounds)):
        found = {name: _timed(run) for name, run in contestants.items()}
        if number < 0:
            continue
        quiet = max(foreign for _, foreign in found.values()) < QUIET_CORES
        for name, (seconds, foreign) in found.items():
            times[name].seconds.append(seconds)
            times[name].foreign.append(foreign)
            times[name].quiet.append(quiet)
        if min(sum(t.quiet) for t in times.values()) >= rounds:
            break
    return times


def foreign_cores(run: Callable[[], object]) -> float:
    """Cores that other processes keep busy while every rank runs something; collective."""
    return _timed(run)[1]


def wait_for_quiet(limit_s: float) -> None:
    """Returns when others left the machine alone for some seconds, or after the limit."""
    deadline = time.monotonic() + limit_s
    still = 0
    while still < _STILL_S and time.monotonic() < deadline:
        busy, start = _busy_s(), time.monotonic()
        time.sleep(1.0)
        cores = (_busy_s() - busy) / (time.monotonic() - start)
        still = still + 1 if cores < 2 * QUIET_CORES else 0


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and cores that others kept busy; the same on every rank."""
    dist.barrier()
    busy, own, start = _busy_s(), time.process_time(), time.perf_counter()
    run()
    mine = (start, time.perf_counter(), time.process_time() - own, busy, _busy_s())
    gathered: list[tuple[float, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    # The clock is one for all processes of a host.
    starts, ends, own_s, busy_before, busy_after = zip(*gathered, strict=True)
    seconds = max(ends) - min(starts)
    return seconds, max(0.0, (max(busy_after) - min(busy_before) - sum(own_s)) / seconds)


def _busy_s() -> float:
    """Seconds that all cores of this machine have worked, for whomever."""
    try:
        with open("/proc/stat") as file:
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    except OSError:
        return 0.0
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S

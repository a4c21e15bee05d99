"""Times contestants against one another: in turns, so that a busy machine hits all of them alike.

::

    round 0    barrier  peer   barrier  ours         each time: from the first rank that starts
    round 1    barrier  peer   barrier  ours                    to the last that ends
"""

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch.distributed as dist

__all__ = ["Times", "alternate"]

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(slots=True)
class Times:
    """Seconds of one contestant, round by round.

    Attributes:
        seconds: of each round.
        foreign: for each round, cores that processes other than ours kept busy.
    """

    seconds: list[float] = field(default_factory=list)
    foreign: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Of all rounds."""
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Interquartile range, relative to the median."""
        if len(self.seconds) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return (high - low) / self.median_s


def alternate(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int, warm_up: int = 2
) -> dict[str, Times]:
    """Runs every contestant in every round; collective over all ranks, the same result on each."""
    times = {name: Times() for name in contestants}
    for number in range(-warm_up, rounds):
        for name, run in contestants.items():
            seconds, foreign = _timed(run)
            if number >= 0:
                times[name].seconds.append(seconds)
                times[name].foreign.append(foreign)
    return times


def _timed(run: Callable[[], object]) -> tuple[float, float]:
    # The clock is one for all processes of a host.
    dist.barrier()
    busy, own, start = _busy_s(), time.process_time(), time.perf_counter()
    run()
    mine = (start, time.perf_counter(), time.process_time() - own, busy, _busy_s())
    gathered: list[tuple[float, ...]] = [()] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    starts, ends, own_s, busy_before, busy_after = zip(*gathered, strict=True)
    seconds = max(ends) - min(starts)
    foreign = (max(busy_after) - min(busy_before) - sum(own_s)) / seconds
    return seconds, max(0.0, foreign)


def _busy_s() -> float:
    """Seconds that all cores of this machine have worked, for whomever."""
    with open("/proc/stat") as file:
        user, nice, system, _idle, _wait, irq, softirq, steal = map(int, file.readline().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S

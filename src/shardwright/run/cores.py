"""Pins the computing thread of a rank to its cores during a step.

Ranks on CPUs wait for one another and so wake up often, and the kernel likes to place a waking thread next to
the one that woke it. Two ranks then share a core for milliseconds while another core is idle::

    core 0   rank 0 ▇▇▇▇ waits                   ▇▇▇▇▇▇▇▇
    core 1   rank 1 ▇▇▇▇▇▇▇▇▇▇▇▇ sends ▚▚▚▚▚▚▚▚▚ ▇▇▇▇▇▇▇▇
                                       rank 0 woke up here
"""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from shardwright.run.context import Context


class OwnCores:
    """Cores that no other rank of this host computes on, if there are enough."""

    def __init__(self, context: Context):
        self._all = _allowed()
        self._cores: set[int] = set()
        if context.device.type == "cpu":
            self._cores = share_of(
                self._all,
                local_rank=context.local_rank,
                local_size=context.local_size,
                num_threads=torch.get_num_threads(),
            )

    def in_force(self) -> AbstractContextManager[None]:
        """Keeps the calling thread on these cores; leaves it where it is if it was moved by somebody else.

        What is started outside, such as the workers of a data loader, is free to run anywhere.
        """
        return self._kept() if self._cores and _allowed() == self._all else nullcontext()

    @contextmanager
    def _kept(self) -> Iterator[None]:
        os.sched_setaffinity(0, self._cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._all)


def share_of(cores: set[int], *, local_rank: int, local_size: int, num_threads: int) -> set[int]:
    """The share of one of several ranks; nothing where there are not enough cores for all, or one rank only.

    >>> share_of({0, 1, 2, 3}, local_rank=1, local_size=2, num_threads=2)
    {2, 3}
    >>> share_of({0, 1}, local_rank=1, local_size=4, num_threads=1)
    set()
    """
    each = len(cores) // local_size
    if local_size == 1 or each < num_threads:
        return set()
    return set(sorted(cores)[local_rank * each : (local_rank + 1) * each])


def _allowed() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()

"""Times a rank's part of a unit beside the whole unit.

Smaller products take longer than their operations say.
"""

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from shardwright.torch.interception.trace_marker import tracing
from shardwright.torch.measuring.measure import Clock
from shardwright.torch.script_collectives.replica_collectives import over_replicas
from shardwright.torch.tensor_parallel.search import Phase, TimedRun, WorkShares, is_small
from shardwright.torch.tracing.trace_data import Sample
from shardwright.torch.units.divided_costs import UnitPart

__all__ = ["TimesParts"]

log = logging.getLogger(__name__)

_RUNS = 4

_MOST_S = 1.0
"""A part and its whole are run no more than once where that takes longer: the other ranks wait meanwhile."""


@dataclass(frozen=True, slots=True)
class TimesParts:
    """A `PartTimer` that runs both in turns, on one rank alone: only how they compare is asked for.

    Attributes:
        device: where.
        share_cores: processes take turns on the cores.
        operation_s: what an operation on divided tensors takes beyond its own time.
        samples: of units, by the id of the module: with autocast, and with the hooks that change something.
            Others do not see that units are run.
    """

    device: torch.device
    share_cores: bool
    operation_s: float
    samples: Mapping[int, Sample]

    def __call__(self, part: UnitPart, forward: Phase, backward: Phase) -> WorkShares | None:
        """See `PartTimer`."""
        module = part.unit.module
        if not is_small(module):
            return None  # there must be room for two copies
        sample = self.samples[id(module)]
        try:
            of_part, of_whole = sample.hooks.unseen(module, lambda: self._seconds(part, sample))
        except Exception as error:  # on random numbers; the work of its operations says what it takes
            log.info("a part of %s cannot be timed: %s", type(module).__name__, error)
            return None
        shares = [
            max(taken_s - phase.num_divided * self.operation_s, 0.0) / whole_s if whole_s > 0 else 1.0
            for taken_s, whole_s, phase in zip(of_part, of_whole, (forward, backward), strict=True)
        ]
        return WorkShares(*shares)

    @tracing()
    def _seconds(self, part: UnitPart, sample: Sample) -> tuple[list[float], list[float]]:
        """Of forward and backward, of the part and of the whole."""
        run_of = partial(
            TimedRun,
            part.unit,
            rank=part.rank,
            num_ranks=part.num_ranks,
            prices=part.prices,
            autocast=sample.autocast,
        )
        runs = [run_of(part.cuts, experts=part.experts, between=part.between), run_of({})]
        clock = Clock(self.device, share_cores=self.share_cores)
        times: list[list[tuple[float, float]]] = [[], []]
        begun_s = time.perf_counter()
        with over_replicas(sends=False):
            for done in range(1 + _RUNS):  # the first decides, and warms up
                if done > 1 and time.perf_counter() - begun_s > _MOST_S:
                    break
                for run, found in zip(runs, times, strict=True):
                    found.append(run.step(clock.now))
        # Few runs on a machine that may be busy: the fastest is the one that was disturbed least.
        of_part, of_whole = ([min(each) for each in zip(*found[1:], strict=True)] for found in times)
        return of_part, of_whole

"""Times a rank's part of a unit beside the whole unit.

Smaller products take longer than their operations say. All ranks of a group do so at the same time, as they
will compute at the same time: they share caches and the bandwidth of the memory.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from math import inf

import torch

from shardwright.run.timing import Timing
from shardwright.torch.interception.trace_marker import tracing
from shardwright.torch.measuring.measure import Clock
from shardwright.torch.randomness.python_random import python_random_kept
from shardwright.torch.randomness.rng import get_state, set_state
from shardwright.torch.script_collectives.replica_collectives import over_replicas
from shardwright.torch.tensor_parallel.search import Phase, TimedRun, WorkShares, is_small
from shardwright.torch.tracing.trace_data import Sample
from shardwright.torch.units.divided_costs import UnitPart

__all__ = ["TimesParts"]

log = logging.getLogger(__name__)

_RUNS = 4

_MOST_S = 1.0
"""A part and its whole are run no more than once where that takes longer."""


@dataclass(slots=True, kw_only=True)
class TimesParts:
    """A `PartTimer` that runs both in turns on one rank: only how they compare is asked for.

    Attributes:
        device: where.
        share_cores: processes take turns on the cores.
        operation_s: what an operation on divided tensors takes beyond its own time.
        samples: of calls, by cost class: with autocast, and with the hooks that change something. Others do
            not see that units are run.
        generators: the script's own, from which units draw: they stay as they are.
        budget_s: seconds that the parts of one way to divide the model may take.
        left_s: what is left of them.
        remembered: what earlier runs have found, by part.
        found: what was timed now, by part: its seconds for each second of the whole unit.
        on_own_cores: surrounds what is timed.
    """

    device: torch.device
    share_cores: bool
    operation_s: float
    samples: Mapping[str, Sample]
    generators: Sequence[torch.Generator] = ()
    budget_s: float = inf
    remembered: Mapping[str, Timing] = field(default_factory=dict)
    found: dict[str, Timing] = field(default_factory=dict)
    on_own_cores: Callable[[], AbstractContextManager[None]] = nullcontext
    left_s: float = inf

    def __call__(self, part: UnitPart, forward: Phase, backward: Phase) -> WorkShares | None:
        """See `PartTimer`."""
        module = part.unit.module
        if not is_small(module):
            return None  # there must be room for two copies
        key = self._key(part)
        known = self.remembered.get(key) or self.found.get(key)
        if known is None:
            if self.left_s <= 0:
                return None
            known = self._timing(part, (forward, backward))
            if known is None:
                return None
            self.found[key] = known
        return WorkShares(known.forward_s, known.backward_s)

    @staticmethod
    def _key(part: UnitPart) -> str:
        """Of the call, of what follows it (a head takes another time with another loss), and of the part."""
        of_part = (
            sorted(part.cuts.items()),
            sorted(part.experts),
            part.rank,
            part.num_ranks,
            part.between,
            sorted(part.unit.shared),
        )
        digest = hashlib.sha256(repr(of_part).encode()).hexdigest()[:16]
        return f"{' '.join(part.unit.cost_classes)} part {digest}"

    def _timing(self, part: UnitPart, phases: tuple[Phase, Phase]) -> Timing | None:
        module = part.unit.module
        sample = self.samples[part.unit.cost_classes[0]]
        state, begun_s = get_state(self.device, self.generators), time.perf_counter()
        try:
            with self.on_own_cores(), python_random_kept():
                of_part, of_whole = sample.hooks.unseen(module, lambda: self._seconds(part, sample))
        except Exception as error:  # on random numbers; the work of its operations says what it takes
            log.info("a part of %s cannot be timed: %s", type(module).__name__, error)
            return None
        finally:
            set_state(state, self.device, self.generators)
            self.left_s -= time.perf_counter() - begun_s
        forward, backward = (
            max(taken_s - phase.num_divided * self.operation_s, 0.0) / whole_s if whole_s > 0 else 1.0
            for taken_s, whole_s, phase in zip(of_part, of_whole, phases, strict=True)
        )
        return Timing(forward_s=forward, backward_s=backward)

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
        most_s, begun_s = min(_MOST_S, self.left_s / 2), time.perf_counter()
        with over_replicas(sends=False):
            for done in range(1 + _RUNS):  # the first decides, and warms up
                if done > 1 and time.perf_counter() - begun_s > most_s:
                    break
                for run, found in zip(runs, times, strict=True):
                    found.append(run.step(clock.now))
        # Few runs on a machine that may be busy: the fastest is the one that was disturbed least.
        of_part, of_whole = ([min(each) for each in zip(*found[1:], strict=True)] for found in times)
        return of_part, of_whole

"""Times units in a budget: medians of some runs, and which cost class comes next.

::

    1. each kind of unit once, at the largest microbatches; the one first that takes most of a step
    2. the smallest microbatches of the kinds that leave most in doubt: what a call takes besides its data
    3. the classes whose spread leaves most of a step in doubt, again, until little is

A class is a kind of unit at one size of microbatches. Between two sizes its seconds are interpolated. What
slows a shared machine down lasts longer than one timing, so a class gets its turns apart from each other.

Turns 2 and 3 end after as many seconds as `_STEPS` steps of the model take: what they find out spares less.
"""

import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.model_graph import ModelGraph, Node
from shardwright.profile import Cost, UnitCost

_BUDGET_S = 0.05
_MIN_RUNS, _MAX_RUNS = 3, 15
# What the runtime takes for one more call in a forward: `benchmarks/pipeline.py --only E` with 1 to 32 units.
_INTERCEPTION_S = 5e-6


@dataclass(frozen=True, slots=True)
class Timing(Cost):
    """Median seconds of one call: of the forward with what its backward needs, and of the backward.

    Attributes:
        spread: interquartile range of forward + backward, relative to its median.
        inferred: it was not timed, but follows from those of other sizes of microbatches.
    """

    spread: float = 0.0
    inferred: bool = False

    @classmethod
    def of_runs(cls, runs: Sequence[Sequence[float]]) -> "Timing":
        """The medians of several runs: seconds of the forward, of the backward, perhaps of others."""
        forward_s, backward_s, *_ = (statistics.median(column) for column in zip(*runs, strict=True))
        totals = [sum(seconds) for seconds in runs]
        middle = statistics.median(totals)
        quartiles = statistics.quantiles(totals, n=4) if len(totals) > 1 else [middle] * 3
        spread = (quartiles[2] - quartiles[0]) / middle if middle else 0.0
        return cls(forward_s=forward_s, backward_s=backward_s, spread=spread)

    @property
    def whole_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s

    def slower(self, factor: float) -> "Timing":
        """The same on a machine that takes so many times as long."""
        return self.scaled(seconds=factor, num_bytes=1.0)


def repetitions() -> Iterator[int]:
    """Counts the runs of a unit: one to warm up, and others until they have taken a while."""
    started_s = 0.0
    for run in range(_MAX_RUNS + 1):
        yield run
        if run == 0:
            started_s = time.perf_counter()
        elif run >= _MIN_RUNS and time.perf_counter() - started_s > _BUDGET_S:
            return


def unit_cost(node: Node, graph: ModelGraph, timing: Timing) -> UnitCost:
    """The cost of a call, with measured seconds."""
    return UnitCost(
        forward_s=timing.forward_s + _INTERCEPTION_S,
        backward_s=timing.backward_s,
        input_s=timing.input_s,
        weight_s=timing.weight_s,
        saved_bytes=node.saved_bytes,
        work_bytes=node.work_bytes,
        weight_bytes=node.weight_bytes,
        split_work_bytes=node.split_work_bytes,
        input_bytes=sum(graph.values[value].spec.num_bytes for value in node.inputs),
        flops=node.flops,
        provenance="measured",
        spread=timing.spread,
    )


_MOST_TURNS = 8
_LITTLE_DOUBT = 0.05
"""Of the seconds of a step: not much more than plans differ by."""

_STEPS, _LEAST_S = 20, 0.2
"""More than a turn of each kind may take so many steps of the model, and at least so many seconds."""

_ERRORS = (1.0, 0.25, 0.05)
"""Relative error of an estimate; of what is inferred from one other size of its kind; from two or more."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a class has of a step.

    Attributes:
        kind: of unit, the same for all sizes of microbatches.
        seconds: that a step spends in it, as estimated.
        microbatches: of a batch; the more, the smaller they are.
    """

    kind: str
    seconds: float
    microbatches: int = 1
    calls: int = 1


@dataclass(slots=True)
class Turns:
    """The turns of all classes.

    Attributes:
        shares: of the classes, those included that earlier runs have timed.
        budget_s: seconds after which no further turn begins.
        remembered: what earlier runs have timed: it gets no turn. What they have inferred may get one.
        timed: what was timed now, one of each turn.
    """

    shares: Mapping[str, Share]
    budget_s: float
    remembered: Mapping[str, Timing] = field(default_factory=dict)
    timed: dict[str, list[Timing]] = field(default_factory=dict)
    failed: set[str] = field(default_factory=set)

    def next(self, spent_s: float) -> str | None:
        """The class to time next; None where the budget is spent, or little is in doubt."""
        if spent_s >= self.budget_s and (self.timed or self.remembered or self.failed):
            return None
        done = self.failed | {key for key, timing in self.remembered.items() if not timing.inferred}
        open_ = [key for key in self.shares if key not in done and self._num_turns(key) < _MOST_TURNS]
        if not open_:
            return None
        known = self._kinds()
        new = [key for key in open_ if self.shares[key].kind not in known]
        if new:
            return max(new, key=lambda key: (self.shares[key].seconds, -self.shares[key].microbatches))
        if self.doubt_of(open_) <= _LITTLE_DOUBT:  # in what can still be known better
            return None
        if spent_s >= max(_LEAST_S, _STEPS * self.step_s):
            return None
        most = max(open_, key=self._doubt_of)
        return most if most in self.timed else self._farthest(most, open_)

    def _farthest(self, key: str, open_: Iterable[str]) -> str:
        """The class of the same kind, not timed yet, whose size differs most from those that are."""
        kind = self.shares[key].kind
        known = (*self.timed, *(each for each in self.remembered if each in self.shares))
        sizes = [self.shares[each].microbatches for each in known if self.shares[each].kind == kind]
        sizes = sizes or [self.shares[key].microbatches]  # it cannot be run at another size
        untimed = [each for each in open_ if each not in self.timed and self.shares[each].kind == kind]

        def distance(each: str) -> float:
            own = self.shares[each].microbatches
            return min(max(own / size, size / own) for size in sizes)

        return max(untimed, key=distance)

    def add(self, key: str, timing: Timing | None) -> None:
        """Notes the timing of a class; None where it cannot be run."""
        if timing is None:
            self.failed.add(key)
        else:
            self.timed.setdefault(key, []).append(timing)

    def doubt_of(self, keys: Iterable[str]) -> float:
        """The share of all seconds by which these classes may be wrong, as if all erred alike."""
        whole_s = sum(share.seconds for share in self.shares.values())
        return sum(map(self._doubt_of, keys)) / whole_s if whole_s > 0 else 0.0

    @property
    def step_s(self) -> float:
        """Seconds of a step of one process: estimates, times what those that were timed took more."""
        known = {key: found[-1] for key, found in self.timed.items()}
        known |= {key: timing for key, timing in self.remembered.items() if key in self.shares}
        guess_s = sum(self.shares[key].seconds for key in known)
        found_s = sum(self.shares[key].calls * timing.whole_s for key, timing in known.items())
        all_s = sum(share.seconds for share in self.shares.values())
        steps = len({share.microbatches for share in self.shares.values()})
        return all_s / steps * found_s / guess_s if guess_s > 0 else 0.0

    def _num_turns(self, key: str) -> int:
        return len(self.timed.get(key, ()))

    def _kinds(self) -> Counter[str]:
        """For each kind, at how many sizes it is known; or known not to run."""
        known = (*self.timed, *self.failed, *(key for key in self.remembered if key in self.shares))
        return Counter(self.shares[key].kind for key in known)

    def _doubt_of(self, key: str) -> float:
        """Seconds of a step by which the class may be wrong."""
        found = self.timed.get(key)
        seconds = self.shares[key].seconds
        if not found and key in self.remembered:
            before = self.remembered[key]
            return seconds * before.spread / 2 if before.inferred else 0.0
        if not found:
            return seconds * _ERRORS[min(self._kinds()[self.shares[key].kind], len(_ERRORS) - 1)]
        within = statistics.fmean(timing.spread for timing in found) / 2
        wholes = [timing.whole_s for timing in found]
        middle = statistics.median(wholes)
        between = (max(wholes) - min(wholes)) / 2 / middle if middle else 0.0
        return float(seconds * max(within, between) / len(found) ** 0.5)

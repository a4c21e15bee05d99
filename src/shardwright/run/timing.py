"""The seconds that units take, as a front end times them: medians of some runs, in a budget."""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
    def of_runs(cls, runs: Sequence[Sequence[float]], *, input_s: float | None = None) -> "Timing":
        """The medians of several runs: seconds of the forward, of the backward, perhaps of others."""
        forward_s, backward_s, *_ = (statistics.median(column) for column in zip(*runs, strict=True))
        totals = [sum(seconds) for seconds in runs]
        middle = statistics.median(totals)
        quartiles = statistics.quantiles(totals, n=4) if len(totals) > 1 else [middle] * 3
        spread = (quartiles[2] - quartiles[0]) / middle if middle else 0.0
        return cls(forward_s=forward_s, backward_s=backward_s, input_s=input_s, spread=spread)

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

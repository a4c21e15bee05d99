"""A model over the ranks of a tensor-parallel group: what its units cost there.

::

    whole unit     forward 8 ms                        backward 16 ms
    over 2 ranks   forward 4.1 ms + exchange 0.5 ms    backward 8.2 ms + exchange 0.5 ms    settling, a step
                           │                 │
                     share of the work   collectives x latency + bytes / bandwidth, operations x dispatch

What ranks send and keep is worked out once, on tensors without data (`torch/units/tensor_division.py`).
Seconds follow from those of the whole unit, measured or estimated, for microbatches of any size.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from shardwright.costs.calibration import DIVIDED_OPERATION_S
from shardwright.model_graph import ModelGraph, TensorSpec
from shardwright.placement import BetweenUnits, Cut
from shardwright.plan import TensorPlan, TensorPrices
from shardwright.profile import Profile, UnitCost


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """A forward, or a backward, of a divided unit, on the busiest rank.

    Attributes:
        pace: seconds of that work, measured, over as large a share of those of the whole unit. Smaller
            products take longer than their operations say. 1 where it was not measured.
    """

    share: float = 1.0
    pace: float = 1.0
    calls: int = 0
    num_bytes: int = 0
    operations: int = 0

    def seconds(self, whole_s: float, prices: TensorPrices, size: float, *, operation_s: float) -> float:
        exchange_s = prices.exchange_s(self.calls, self.num_bytes * size)
        return whole_s * self.share * self.pace + exchange_s + self.operations * operation_s


@dataclass(frozen=True, slots=True, kw_only=True)
class DividedUnit:
    """A unit over the ranks of a group.

    Attributes:
        kept_share: of the bytes that the whole unit keeps for its backward.
        settling_calls, settling_bytes: once a step, gradients get the placements of their parameters.
        inside_share: of the tensors between it and the operations behind it that belong to it.
    """

    forward: Passage = field(default_factory=Passage)
    backward: Passage = field(default_factory=Passage)
    kept_share: float = 1.0
    settling_calls: int = 0
    settling_bytes: int = 0
    inside_share: float = 1.0

    @classmethod
    def of_share(cls, share: float) -> Self:
        """What computes and keeps a share, and exchanges nothing."""
        return cls(forward=Passage(share=share), backward=Passage(share=share), kept_share=share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """How the ranks of a tensor-parallel group share a model.

    Attributes:
        samples: of the microbatch for which bytes were worked out.
        decided_by: prices by which they choose the placements of what they compute; None: these.
        cuts: of parameters, by name; each rank has all of the others.
        experts: names of parameters of experts, where all ranks of the group have different experts, and some
            of them share layers.
        units: by name; those that are left out are computed whole by every rank.
        operations: between units, by the number of their node.
        values: shares of tensors between units on the busiest rank, by their number; where they are no matter
            of `between`.
        between: where tensors between units are; None: every rank has all of them.
        operation_s: what an operation on divided tensors takes beyond its own time.
    """

    degree: int
    samples: int
    prices: TensorPrices
    decided_by: TensorPrices | None = None
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    experts: frozenset[str] = frozenset()
    units: Mapping[str, DividedUnit] = field(default_factory=dict)
    operations: Mapping[int, DividedUnit] = field(default_factory=dict)
    values: Mapping[int, float] = field(default_factory=dict)
    between: BetweenUnits | None = None
    operation_s: float = DIVIDED_OPERATION_S

    def plan_of(self, graph: ModelGraph) -> TensorPlan:
        """What a plan says of it."""
        names = [name for name, each in graph.parameters.items() if not each.is_buffer]
        dim = None if self.between is None else self.between.dim
        again = None if self.between is None else self.between.inner_dim
        prices = self.decided_by or self.prices
        return TensorPlan.of(
            self.cuts, names, prices, between_units=dim, cut_again=again, experts=self.experts
        )

    def profile(self, graph: ModelGraph, whole: Profile) -> Profile:
        """The costs of a graph's units on the busiest rank."""
        costs = dict(whole.costs)
        size = graph.batch_size / self.samples
        for node in graph.nodes:
            unit = self.units.get(node.name)
            if (
                node.kind == "unit"
                and unit is not None
                and costs[node.cost_class] is whole.costs[node.cost_class]
            ):
                costs[node.cost_class] = self._cost(unit, whole.costs[node.cost_class], size)
        return replace(whole, costs=costs)

    def _cost(self, unit: DividedUnit, whole: UnitCost, size: float) -> UnitCost:
        share, kept = unit.backward.share * unit.backward.pace, unit.kept_share
        given: Any = {"prices": self.prices, "size": size, "operation_s": self.operation_s}
        apart_s = unit.backward.seconds(0.0, **given) if whole.backward_s else 0.0
        return replace(
            whole,
            forward_s=unit.forward.seconds(whole.forward_s, **given),
            backward_s=whole.backward_s * share + apart_s,
            weight_s=whole.weight_s * share,
            input_s=None if whole.input_s is None else whole.input_s * share + apart_s,
            saved_bytes=round(whole.saved_bytes * kept),
            weight_bytes=None if whole.weight_bytes is None else round(whole.weight_bytes * kept),
            work_bytes=round(whole.work_bytes * kept),
            split_work_bytes=None if whole.split_work_bytes is None else round(whole.split_work_bytes * kept),
            input_bytes=round(whole.input_bytes * self._share_between),
            flops=round(whole.flops * unit.forward.share),
        )

    def between_bytes(self, value: int, spec: TensorSpec) -> int:
        """Bytes of a tensor between units on the rank with most of it."""
        share = self.values.get(value, 1.0) if self.between is None else self.between.share(spec.shape)
        return round(spec.num_bytes * share)

    def share_of_operation(self, number: int) -> float:
        """What is left of an operation between units on the busiest rank."""
        return self.operations.get(number, _WHOLE).kept_share

    @property
    def _share_between(self) -> float:
        if self.between is None:
            return 1.0
        inner = 1 if self.between.inner_dim is None else self.between.inner_ranks
        return 1 / (self.between.num_ranks * inner)

    def settling_s(self, name: str) -> float:
        """Seconds of settling the gradients of a unit, once a step."""
        unit = self.unit(name)
        return self.prices.exchange_s(unit.settling_calls, unit.settling_bytes)

    def held(self, name: str, num: int) -> int:
        """Of so many elements or bytes of a parameter, those of the rank with most."""
        cut = self.cuts.get(name)
        if cut is None or not cut.size:
            return num
        return -(-num * max(cut.length(rank) for rank in range(self.degree)) // cut.size)

    def unit(self, name: str) -> DividedUnit:
        return self.units.get(name, _WHOLE)

    def exchange_of(self, unit: DividedUnit, samples: int) -> tuple[float, float, int]:
        """Seconds of an exchange in the forward and the backward, and the bytes that a rank sends in both."""
        size = samples / self.samples
        forward_s, backward_s = (
            self.prices.exchange_s(each.calls, each.num_bytes * size)
            for each in (unit.forward, unit.backward)
        )
        return forward_s, backward_s, round((unit.forward.num_bytes + unit.backward.num_bytes) * size)

    def collectives(self, name: str) -> int:
        """Collectives in a forward and a backward of a unit."""
        unit = self.unit(name)
        return unit.forward.calls + unit.backward.calls

    def dispatch_s(self, name: str) -> float:
        """What Python takes for the operations of a unit on divided tensors, forward and backward."""
        unit = self.unit(name)
        return (unit.forward.operations + unit.backward.operations) * self.operation_s

    def shares(self, name: str) -> tuple[float, float]:
        """What is left of a unit's work, and of the bytes that it keeps, on the busiest rank."""
        unit = self.unit(name)
        return (unit.forward.share + 2 * unit.backward.share) / 3, unit.kept_share


_WHOLE = DividedUnit()

UNDIVIDED = Division(
    degree=1,
    samples=1,
    prices=TensorPrices(latency_s=0.0, bandwidth_Bps=1.0, flops_per_s=1.0, memory_Bps=1.0),
)
"""Each rank has all of the layers of its stage, and exchanges nothing for them."""

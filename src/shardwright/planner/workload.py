"""A chain of calls at one number of microbatches, on given machines: where it is best cut.

A lower bound on the seconds of a pipeline step, whatever the order of its actions.

No rank starts before its first input has reached it, and its last gradient still has to travel back::

    rank 0   [F][F][F]                    [B][B][B]
    rank 1   ---[ all that rank 1 computes ]---          way there + work + way back
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from shardwright.costs.chain import split
from shardwright.planner.chain import Chain
from shardwright.planner.cuts import improve
from shardwright.planner.fabric import Fabric
from shardwright.planner.keeping import choose_keeping
from shardwright.planner.layout import Layout
from shardwright.planner.objective import Demands, Objective, build_objective, build_tables
from shardwright.planner.rank_memory import in_flight
from shardwright.schedule import Edge, Kind, build_schedule


@lru_cache(maxsize=512)
def _flying(kind: str, ranks: tuple[int, ...], num_microbatches: int, active: int | None) -> tuple[int, ...]:
    """Microbatches in flight on each stage, by the order that the family takes for equal stages."""
    num_ranks = max(ranks) + 1
    if kind != "gpipe" and num_microbatches > 3 * num_ranks:
        # Steady after two rounds over the ranks; what is left of a last, short round changes the order.
        num_microbatches = 2 * num_ranks + num_microbatches % num_ranks
    schedule = build_schedule(
        kind, stage_ranks=ranks, num_microbatches=num_microbatches, active_microbatches=active
    )
    return in_flight(schedule)


class Workload:
    """A chain at one number of microbatches, on given machines; caches its results."""

    def __init__(self, chain: Chain, *, num_microbatches: int, fabric: Fabric, demands: Demands):
        self.chain = chain
        self.num_microbatches = num_microbatches
        self.fabric = fabric
        self.demands = demands
        self._objectives: dict[float, Objective] = {}
        self._free_splits: dict[tuple[float, tuple[float, ...]], tuple[int, ...] | None] = {}

    def keeping_less(self, layout: Layout, in_flight: Sequence[int]) -> Layout:
        """The layout with units that keep less, where memory requires it and the settings allow it."""
        return choose_keeping(
            layout,
            self.demands,
            in_flight=in_flight,
            host=self.fabric.host,
            num_microbatches=self.num_microbatches,
            batch_bytes=self.batch_bytes,
        )

    @property
    def batch_bytes(self) -> int:
        return self.chain.batch_bytes * self.num_microbatches

    def objective(self, exposed: float) -> Objective:
        if exposed not in self._objectives:
            demands, known = self.demands, next(iter(self._objectives.values()), None)
            if demands.limit_bytes:
                demands = replace(demands, limit_bytes=max(1, demands.limit_bytes - 2 * self.batch_bytes))
            self._objectives[exposed] = build_objective(
                build_tables(self.chain) if known is None else known.tables,
                demands,
                link=self.fabric.neighbour_link,
                exposed=exposed,
                host=self.fabric.host,
            )
        return self._objectives[exposed]

    def step_seconds(self, schedule_s: float, sums_s: float, layout: Layout) -> float:
        """Seconds of a step: schedule, sums of gradients, what is around them."""
        fabric = self.fabric
        sums_s += layout.settling_seconds()
        return schedule_s * fabric.crowding + sums_s + fabric.tie_seconds(layout) + fabric.step_overhead_s

    def forward_overhead_s(self, layout: Layout) -> float:
        """Seconds that a rank takes to run the step function for one forward, beside computing."""
        chain = layout.chain
        script_s = self.fabric.host_costs.script_s(units=chain.num_calls, operations=chain.operations)
        return script_s * layout.num_ranks / layout.num_stages

    def in_flight(self, kind: str, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Microbatches in flight on each stage, by the order that the family takes for equal stages."""
        return _flying(kind, ranks, self.num_microbatches, self.demands.active_microbatches)

    def cut(
        self, ranks: tuple[int, ...], in_flight: Sequence[int], *, exposed: float, heeds_speed: bool
    ) -> tuple[int, ...]:
        """The positions of the calls at which the chain is best cut."""
        starts = self.chain.starts
        return tuple(starts[cut] for cut in self._cut(ranks, in_flight, exposed, heeds_speed=heeds_speed))

    def _cut(
        self, ranks: tuple[int, ...], flying: Sequence[int], exposed: float, *, heeds_speed: bool
    ) -> tuple[int, ...]:
        objective = self.objective(exposed)
        num_atoms, num_stages = self.chain.num_atoms, len(ranks)
        several = num_stages > max(ranks) + 1
        slowness = self.fabric.slowness if heeds_speed else ()
        of_stages = tuple(slowness[rank] for rank in ranks) if slowness else (1.0,) * num_stages

        def key(cuts: tuple[int, ...]) -> tuple[float, ...]:
            return objective.rank_key(cuts, ranks=ranks, in_flight=flying, slowness=slowness)

        cuts = self._free_split(exposed, of_stages)
        if self.demands.memory_weight or not objective.fits(cuts, ranks=ranks, in_flight=flying):
            limited = split(
                num_atoms,
                num_stages=num_stages,
                cost_of_stage=lambda stage: objective.cost(flying[stage], of_stages[stage]),
            )
            several = several or limited is None
            cuts = limited or cuts
        return improve(cuts, key=key) if several else cuts

    def _free_split(self, exposed: float, slowness: tuple[float, ...]) -> tuple[int, ...]:
        """The fastest split where memory is no limit, for stages that take so many times as long."""
        known = self._free_splits.get((exposed, slowness))
        if known is None:
            objective = self.objective(exposed)
            free = replace(objective, demands=replace(objective.demands, limit_bytes=0, memory_weight=0.0))
            known = split(
                self.chain.num_atoms,
                num_stages=len(slowness),
                cost_of_stage=lambda stage: free.cost(1, slowness[stage]),
            )
            assert known is not None
            self._free_splits[exposed, slowness] = known
        return known


def least_seconds(
    layout: Layout,
    *,
    num_microbatches: int,
    may_split: bool = True,
    overhead_s: float = 0.0,
    forward_overhead_s: float = 0.0,
) -> float:
    """A lower bound on the simulated seconds of any schedule of a layout, in closed form."""
    costs, edges, m = layout.stage_costs(), layout.edges(), num_microbatches
    forward = [cost.forward_s + overhead_s + forward_overhead_s for cost in costs]
    backward = [cost.seconds(Kind.BACKWARD) + overhead_s for cost in costs]
    until_input = list(backward)
    if may_split:
        inputs = [cost.seconds(Kind.BACKWARD_INPUT) + overhead_s for cost in costs]
        weights = [cost.seconds(Kind.BACKWARD_WEIGHT) + overhead_s for cost in costs]
        backward = [min(b, i + w) for b, i, w in zip(backward, inputs, weights, strict=True)]
        until_input = list(map(min, until_input, inputs))
    there, back = _ways(edges, forward, until_input)
    least_s = 0.0
    for rank in range(layout.num_ranks):
        stages = layout.stages_of(rank)
        start_s, return_s = min(there[s] for s in stages), min(back[s] for s in stages)
        least_s = max(
            least_s,
            start_s + m * sum(forward[s] + backward[s] for s in stages),
            start_s + m * sum(forward[s] + until_input[s] for s in stages) + return_s,
        )
    return least_s


def _ways(
    edges: Sequence[Edge], forward: Sequence[float], until_input: Sequence[float]
) -> tuple[list[float], list[float]]:
    """For each stage: seconds of the stages before its first forward, and after its last gradient."""
    there, back = [0.0] * len(forward), [0.0] * len(forward)
    for edge in edges:  # by source: whatever leads there came before
        there[edge.target] = max(there[edge.target], there[edge.source] + forward[edge.source])
        if edge.has_gradient:
            back[edge.target] = max(back[edge.target], back[edge.source] + until_input[edge.source])
    return there, back

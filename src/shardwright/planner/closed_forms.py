"""The first sieve of a search: closed forms price every grid of ranks at once, before any is planned.

::

    one trace ─► chain of layers ─┐
                                  ├─► columns: grid x microbatches x schedule, with and without recomputation
    all grids of the settings ────┘      │
                                         │ `costs.chain` prices all of them
                                         ▼
                              the least seconds of each grid ─► which to plan first, and which not at all

They are those of ``shardwright search``. Where units were measured, the price of computing is scaled to them.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.costs import (
    BF16,
    FP32,
    MOMENT_BYTES,
    Gathers,
    Offload,
    Options,
    Placement,
    Recompute,
    ScheduleKind,
    Sharded,
    StepSeconds,
    chain_prices,
)
from shardwright.costs.calibration import ACTION_S, STEP_S
from shardwright.costs.run_cluster import kinds_of
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.planner.division import Division
from shardwright.planner.drafts import schedule_families
from shardwright.planner.fabric import Fabric
from shardwright.planner.model_chain import chain_of
from shardwright.planner.profiles import estimate_profile, microbatch_counts
from shardwright.profile import Profile

_ROOM = 0.7
"""Plans need 0.75 to 1.3 times the memory of the closed forms: what needs this share of it may still fit."""

Floats = NDArray[np.float64]


def expected_seconds(
    graph: ModelGraph,
    grids: Sequence[Mesh],
    *,
    cluster: Cluster,
    config: Config,
    samples: int,
    profile: Profile | None = None,
    divisions: Mapping[int, Division] | None = None,
) -> list[float]:
    """Seconds of a step without its update, divided by the replicas, for each grid at its best.

    A grid's best is over the microbatches, schedules and recomputation that the settings leave open. It is
    infinite where memory holds no part of it, or the chain has fewer layers than the grid has stages.
    """
    pace = 1.0 if profile is None else _pace(graph, profile, cluster)
    found = [inf] * len(grids)
    for tensor in sorted({mesh.share for mesh in grids}):
        forms = _ClosedForms(
            chain=chain_of(graph, name="", division=(divisions or {}).get(tensor)),
            cluster=cluster,
            config=config,
            samples=samples,
            pace=pace,
            units=len(graph.calls),
            operations=graph.operations,
        )
        for pipeline in sorted({mesh.pipeline for mesh in grids if mesh.share == tensor}):
            alike = [n for n, mesh in enumerate(grids) if (mesh.pipeline, mesh.share) == (pipeline, tensor)]
            for number, seconds in zip(alike, forms.of_pipeline([grids[n] for n in alike]), strict=True):
                found[number] = seconds
    return found


def expected_in_turn(grids: Sequence[Mesh], expected: Callable[[list[Mesh]], Sequence[float]]) -> list[float]:
    """Seconds of all grids, those with the same units together."""
    seconds = [0.0] * len(grids)
    kinds = [mesh.pipeline if mesh.share > 1 else 0 for mesh in grids]
    for kind in sorted(set(kinds)):
        alike = [number for number, own in enumerate(kinds) if own == kind]
        for number, found in zip(alike, expected([grids[number] for number in alike]), strict=True):
            seconds[number] = found
    return seconds


def _pace(graph: ModelGraph, profile: Profile, cluster: Cluster) -> float:
    """Measured over estimated seconds of the measured units of a graph; 1 where none is measured."""
    estimated = estimate_profile(graph, device=cluster.device)
    measured_s = estimated_s = 0.0
    for node in graph.nodes:
        known, guess = profile.costs.get(node.cost_class), estimated.costs.get(node.cost_class)
        if known is not None and guess is not None and known.provenance == "measured":
            measured_s += known.forward_s + known.backward_s
            estimated_s += guess.forward_s + guess.backward_s
    return measured_s / estimated_s if measured_s > 0 and estimated_s > 0 else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _ClosedForms:
    """The prices of grids.

    Attributes:
        chain: the layers of the model, as one rank of a tensor-parallel group has them.
        pace: how many times as long layers compute as the rates of the machines say.
        units: calls of them in a step function.
    """

    chain: LayerChain
    cluster: Cluster
    config: Config
    samples: int
    pace: float
    units: int
    operations: int

    def of_pipeline(self, grids: Sequence[Mesh]) -> list[float]:
        """The least seconds of grids with one tensor degree and one length of pipelines, by replica."""
        rows = list(self._rows(grids))
        if not rows:
            return [inf] * len(grids)
        of_grid, microbatches, schedule, virtual = np.array(rows, dtype=float).T
        chosen = [grids[int(number)] for number in of_grid]
        ways = Options(
            pipeline=float(grids[0].pipeline),
            tensor=float(grids[0].tensor),
            data=np.array([float(mesh.data) for mesh in chosen]),
            shard=np.array([self._sharded(mesh)[0] for mesh in chosen], dtype=float),
            sharded=np.array([self._sharded(mesh)[1] for mesh in chosen], dtype=float),
            microbatch=self.samples / microbatches,
            microbatches=microbatches,
            schedule=schedule,
            virtual=virtual,
            hierarchical=float(Gathers.FASTER),
            placement=float(_placement(grids[0])),
            width=2.0 if self._in_16_bits else 4.0,
        )
        seconds = (self._with_recomputation(ways, chosen) + self._above_usual(ways, grids[0])) / ways.data
        least = np.full(len(grids), inf)
        np.minimum.at(least, of_grid.astype(int), seconds)
        return [float(each) for each in least]

    def _above_usual(self, ways: Options, mesh: Mesh) -> Floats:
        """What the library takes on these machines above what closed forms count for it."""
        costs = Fabric(cluster=self.cluster, mesh=mesh).host_costs
        actions = 2 * np.where(ways.schedule == ScheduleKind.INTERLEAVED, ways.virtual, 1.0)
        of_microbatch = actions * (costs.action_s - ACTION_S) + costs.script_s(
            units=self.units, operations=self.operations
        )
        found: Floats = costs.step_s - STEP_S + ways.microbatches * of_microbatch
        return found

    @property
    def _in_16_bits(self) -> bool:
        return self.config.bf16 or self.config.fp16

    def _rows(self, grids: Sequence[Mesh]) -> Iterator[tuple[int, int, int, int]]:
        """Numbers of the grid, microbatches, the schedule's family, stages of a rank."""
        pipeline, config = grids[0].pipeline, self.config
        counts = microbatch_counts(self.samples, config=config, pipeline=pipeline)
        for kind, virtual in schedule_families(config, pipeline=pipeline):
            if pipeline * virtual <= len(self.chain.layers):
                yield from (
                    (number, count, ScheduleKind.of(kind), virtual)
                    for number in range(len(grids))
                    for count in counts
                )

    def _sharded(self, mesh: Mesh) -> tuple[int, Sharded]:
        """Ranks that divide states, and which states."""
        if mesh.shard > 1:
            return mesh.shard, Sharded.PARAMETERS
        if (updating := self.config.num_updating(mesh)) > 1:
            return updating, Sharded.OPTIMIZER
        return 1, Sharded.NOTHING

    def _with_recomputation(self, ways: Options, grids: Sequence[Mesh]) -> Floats:
        """Seconds with the recomputation that is asked for; infinite where memory is too small even so."""
        policy, offload = self.config.activation_checkpointing, self.config.offload_activations
        away = Offload.ACTIVATIONS if offload is True else Offload.NOTHING
        first = Recompute.FULL if policy == "full" else Recompute.NONE
        seconds, missing = self._priced(ways, grids, first, away)
        choices = [(Recompute.FULL, away)] if policy == "auto" else []
        if offload == "auto" and self.cluster.host is not None:
            choices += [(again, Offload.ACTIVATIONS) for again in {first, *(again for again, _ in choices)}]
        best, least_missing = seconds, missing
        for again, kept in choices if (missing > 0).any() else ():
            # The share of the layers that memory asks for is computed again, or offloaded.
            all_s, still_missing = self._priced(ways, grids, again, kept)
            share = np.clip(missing / np.maximum(missing - still_missing, 1.0), 0.0, 1.0)
            mixed_s = seconds + share * (all_s - seconds)
            fits, fitted = still_missing <= 0, least_missing <= 0
            better = (missing > 0) & np.where(fits & fitted, mixed_s < best, still_missing < least_missing)
            best, least_missing = (
                np.where(better, mixed_s, best),
                np.where(better, still_missing, least_missing),
            )
        return np.where(least_missing > 0, inf, best)

    def _priced(
        self, ways: Options, grids: Sequence[Mesh], again: Recompute, offload: Offload
    ) -> tuple[Floats, Floats]:
        """Seconds of steps, and the bytes that are missing on a rank."""
        limit = self.config.memory_limit or self.cluster.device.memory_bytes
        kinds, between = kinds_of(
            self.cluster, num_ranks=grids[0].world_size, memory_bytes=limit, pace=self.pace
        )
        precision = BF16 if self._in_16_bits else FP32
        precision = precision.with_moments(2 * MOMENT_BYTES[self.config.optimizer_state])
        if self.config.offload_optimizer and not self.cluster.cores_per_node:
            precision = precision._replace(optimizer=0.0)
        prices = chain_prices(
            _cut_where_least_crosses(self.chain, grids[0].pipeline),
            replace(ways, recompute=float(again), offload=float(offload)),
            kinds,
            between,
            precision=precision,
            width=int(ways.width),
            hides_messages=False,
        )
        return self._seconds(prices.seconds, ways, grids), _ROOM * prices.num_bytes.total - prices.limit

    def _seconds(self, parts: StepSeconds, ways: Options, grids: Sequence[Mesh]) -> Floats:
        """Seconds of a step without the update, as this runtime takes them.

        Messages travel both ways while ranks compute, and hops inside of hosts take next to nothing where
        others leave them. Ranks take the cores of those that wait. Shards are gathered and reduced once a
        batch where memory allows; those of one host lie in memory that its ranks share.
        """
        hop = parts.point_to_point / ways.microbatches
        per_stage = np.where(ways.schedule == ScheduleKind.INTERLEAVED, ways.virtual, 1.0)
        inside = _hops_inside(self._hosts(grids[0].group("pp", 0)))
        bubble = np.maximum(0.0, parts.bubble - inside * hop / per_stage)
        work = parts.compute + parts.recompute + parts.tensor
        alone = work + parts.imbalance + bubble
        crowd = self._ranks_of_a_core(grids[0])
        busiest = np.maximum(np.maximum(alone, crowd * work), parts.point_to_point / 2)
        # Closed forms gather for the forward and for the backward of each microbatch.
        gathers = np.array([0.5 * (len(set(self._hosts(mesh.group("dp_shard", 0)))) > 1) for mesh in grids])
        shards = (gathers * parts.gather + parts.reduce_scatter) / ways.microbatches
        found: Floats = busiest + shards + parts.all_reduce + parts.overhead + parts.offload
        return found

    def _hosts(self, ranks: Sequence[int]) -> list[int]:
        return [rank // self.cluster.ranks_per_node for rank in ranks]

    def _ranks_of_a_core(self, mesh: Mesh) -> float:
        """Ranks of a host for each of its cores; 1 where they have cores, or devices, of their own."""
        ranks = min(self.cluster.ranks_per_node, mesh.world_size)
        return max(1.0, ranks / self.cluster.cores_per_node) if self.cluster.cores_per_node else 1.0


def _placement(mesh: Mesh) -> Placement:
    order = mesh.placement
    return Placement.DPT if order.index("D") < order.index("P") else Placement.PDT


def _hops_inside(hosts: Sequence[int]) -> int:
    """The hops inside of hosts, of a pipeline that leaves one: closed forms price all hops alike."""
    return sum(a == b for a, b in itertools.pairwise(hosts)) if len(set(hosts)) > 1 else 0


def _cut_where_least_crosses(chain: LayerChain, pipeline: int) -> LayerChain:
    """A chain of which no cut sends more than the widest of so many stages has to.

    Closed forms cut by work alone, a plan where less crosses, and keeps wide cuts off slow links.
    """
    widths = sorted(layer.crossing for layer in chain.layers[:-1])
    most = widths[max(0, pipeline - 2)] if widths else 0.0
    layers = tuple(replace(layer, crossing=min(layer.crossing, most)) for layer in chain.layers)
    return replace(chain, layers=layers)

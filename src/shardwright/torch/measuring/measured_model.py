"""Measures a model on the current machines: times its units for every candidate grid of ranks.

::

    for each number of pipeline ranks:  units ─► traces, one for each number of microbatches ─┐
                                                                                              ▼
                                        candidates for the planner ◄── costs ◄── all units, timed together
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan, TensorPrices
from shardwright.planner import (
    Candidates,
    count_groups,
    estimate_profile,
    make_plan,
    microbatch_counts,
)
from shardwright.planner.closed_forms import expected_in_turn, expected_seconds
from shardwright.planner.degrees import with_or_without_sequences
from shardwright.planner.division import Division
from shardwright.planner.fabric import Fabric
from shardwright.profile import Profile, UnitCost
from shardwright.run.context import context
from shardwright.run.machine import present_cluster
from shardwright.run.profiler import Profiler, ToProfile
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.measuring.device_rates import update_rate
from shardwright.torch.measuring.host_costs import with_host_costs
from shardwright.torch.measuring.measure import on_copies
from shardwright.torch.offload.offloading import with_tier
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.units.dry_run import step_of, with_data
from shardwright.torch.units.model_traces import most_stages, trace_parts
from shardwright.torch.units.tensor_division import division_of


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model with the measured costs of its units.

    Attributes:
        candidates: what the planner takes, for each number of pipeline ranks, and whether ranks share layers.
        divide: says how the tensor-parallel ranks of a grid share the model, in units for so many pipeline
            ranks, by such settings.
        costs: what was measured, by cost class.
        cluster: the present machines.
        samples: of a step of one replica.
    """

    candidates: Mapping[tuple[int, bool], Candidates]
    divide: Callable[[Mesh, int, Config], Division]
    costs: Mapping[str, UnitCost]
    cluster: Cluster
    samples: int = 0

    def plans(self, mesh: Mesh, config: Config) -> list[Plan]:
        """The best plan of one grid for each number of microbatches."""
        candidates = self.candidates[_units_of(mesh)]
        failures: list[PlanError] = []
        for counts in count_groups(candidates, sorted(candidates), config=config):
            found = list(self._plans(mesh, config, counts, failures))
            if found:
                return found
        raise failures[-1]

    def expected_seconds(self, grids: Sequence[Mesh], config: Config) -> list[float]:
        """Seconds of a step of each grid, divided by its replicas, by closed forms."""
        return expected_in_turn(grids, lambda some: self._expected(some, config))

    def _expected(self, grids: Sequence[Mesh], config: Config) -> list[float]:
        longest = max(grids, key=lambda mesh: mesh.pipeline)
        of_longest = self.candidates[_units_of(longest)]
        graph, profile = of_longest[min(of_longest)]
        return expected_seconds(
            graph,
            grids,
            cluster=self.cluster,
            config=config,
            samples=self.samples,
            profile=profile,
            divisions={
                mesh.share: self.divide(mesh, longest.pipeline, config) for mesh in grids if mesh.share > 1
            },
        )

    def _plans(
        self, mesh: Mesh, config: Config, counts: Sequence[int], failures: list[PlanError]
    ) -> Iterator[Plan]:
        """The best plan for each of these numbers of microbatches that has one."""
        for number in counts:
            one = {number: self.candidates[_units_of(mesh)][number]}
            try:
                plan_with = partial(self._plan, one, mesh)
                yield with_or_without_sequences(config, plan_with, tensor=mesh.tensor)
            except PlanError as error:
                failures.append(error)

    def _plan(self, candidates: Candidates, mesh: Mesh, config: Config) -> Plan:
        return make_plan(
            candidates,
            cluster=self.cluster,
            config=config,
            mesh=mesh,
            division=self.divide(mesh, mesh.pipeline, config) if mesh.share > 1 else None,
        )


def _units_of(mesh: Mesh) -> tuple[int, bool]:
    """What decides how fine the units of a model are."""
    return mesh.pipeline, mesh.share > 1


def measure_model(
    model: nn.Module,
    arguments: Arguments,
    *,
    loss: Callable[[Any], Tensor] | None,
    config: Config,
    grids: Sequence[Mesh],
) -> MeasuredModel:
    """Times the units of a model; collective over all ranks, in a run of one pipeline."""
    run = context()
    assert run.reporter is not None
    batch = Batch(with_data(arguments, "cpu")).to(run.device)
    kinds = sorted({_units_of(mesh) for mesh in grids})
    with run.reporter.phase("tracing the model"):
        traces = {kind: _traces(model, batch, loss, config, kind, run.device) for kind in kinds}
    cluster = with_host_costs(run, with_tier(run, present_cluster(run, update_rate)))
    with run.reporter.phase("measuring units") as phase:
        sizes = [
            ToProfile(m, trace, estimate_profile(trace.graph, device=cluster.device))
            for of_pipeline in traces.values()
            for m, trace in of_pipeline.items()
        ]
        # Each way to cut the model into units has classes of its own.
        budget_s = run.config.measure_s * len(kinds)
        costs = Profiler(run, time_class=on_copies(run)).measure(sizes, budget_s=budget_s, phase=phase)
    return MeasuredModel(
        candidates={kind: _candidates(traces[kind], costs, cluster) for kind in kinds},
        divide=_Divisions(model, traces, cluster),
        costs=costs,
        cluster=cluster,
        samples=batch.num_samples or 0,
    )


def _traces(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[Any], Tensor] | None,
    config: Config,
    kind: tuple[int, bool],
    device: torch.device,
) -> dict[int, Trace]:
    """A trace for each number of microbatches."""
    pipeline, divides = kind
    if batch.num_samples is None:
        raise PlanError("the batch holds no tensor that can be cut into microbatches.")
    counts = microbatch_counts(batch.num_samples, config=config, pipeline=pipeline)
    return trace_parts(
        model,
        step_of(model, loss),
        {m: batch.split(m)[0] for m in counts},
        device=device,
        num_stages=most_stages(config, pipeline=pipeline, divides=divides),
        divides=divides,
        memory={},
    )


class _Divisions:
    """Finds out how the tensor-parallel ranks of grids share a model, each once."""

    def __init__(
        self,
        model: nn.Module,
        traces: Mapping[tuple[int, bool], Mapping[int, Trace]],
        cluster: Cluster,
    ):
        self._model, self._cluster = model, cluster
        self._traces = {
            pipeline: next(iter(of_counts.items()))
            for (pipeline, divides), of_counts in traces.items()
            if divides
        }
        self._found: dict[tuple[int, int, int, TensorPrices, object], Division] = {}

    def __call__(self, mesh: Mesh, pipeline: int, config: Config) -> Division:
        prices = Fabric(cluster=self._cluster, mesh=mesh).tensor_prices
        key = pipeline, mesh.share, mesh.context, prices, config.sequence_parallel
        if key not in self._found:
            microbatches, trace = self._traces[pipeline]
            self._found[key] = division_of(
                self._model,
                trace,
                config=config,
                mesh=mesh,
                prices=prices,
                microbatches=microbatches,
            )
        return self._found[key]


def _candidates(traces: Mapping[int, Trace], costs: Mapping[str, UnitCost], cluster: Cluster) -> Candidates:
    found: dict[int, Any] = {}
    for number, trace in traces.items():
        estimated = estimate_profile(trace.graph, device=cluster.device)
        profile = Profile(costs={**estimated.costs, **costs}, device=cluster.device.name)
        found[number] = (trace.graph, profile)
    return found

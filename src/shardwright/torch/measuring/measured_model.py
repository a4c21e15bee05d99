"""Measures a model on the current machines: times its units for every candidate grid of ranks.

::

    for each number of pipeline ranks:  units ─► traces, one for each number of microbatches ─┐
                                                                                              ▼
                                        candidates for the planner ◄── costs ◄── all units, timed together
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner import (
    Candidates,
    PastRun,
    RunKind,
    correction_of,
    count_groups,
    estimate_profile,
    make_plan,
    microbatch_counts,
)
from shardwright.profile import Profile, UnitCost
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.measuring.profiler import Profiler
from shardwright.torch.measuring.run_history import history_of
from shardwright.torch.run.context import context
from shardwright.torch.run.machine import present_cluster
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.units.dry_run import step_of, with_data
from shardwright.torch.units.model_traces import trace_parts

__all__ = ["MeasuredModel", "measure_model"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredModel:
    """A model with the measured costs of its units.

    Attributes:
        candidates: for each number of pipeline ranks, what the planner takes.
        costs: what was measured, by cost class.
        cluster: the present machines.
        past_runs: on them, by which predictions are corrected.
        samples: of a step of one replica.
    """

    candidates: Mapping[int, Candidates]
    costs: Mapping[str, UnitCost]
    cluster: Cluster
    past_runs: Sequence[PastRun] = ()
    samples: int = 0

    def plans(self, mesh: Mesh, config: Config) -> list[Plan]:
        """The best plan of one grid for each number of microbatches.

        Raises:
            PlanError: there is none; the message is that of the last.
        """
        candidates = self.candidates[mesh.pipeline]
        failures: list[PlanError] = []
        for counts in count_groups(candidates, sorted(candidates), config=config):
            found = list(self._plans(mesh, config, counts, failures))
            if found:
                return found
        raise failures[-1]

    def _plans(
        self, mesh: Mesh, config: Config, counts: Sequence[int], failures: list[PlanError]
    ) -> Iterator[Plan]:
        """The best plan for each of these numbers of microbatches that has one."""
        kind = RunKind.of(mesh, ranks_per_node=self.cluster.ranks_per_node)
        for number in counts:
            one = {number: self.candidates[mesh.pipeline][number]}
            correction = correction_of(
                self.past_runs, kind, model=one[number][0].model_fingerprint, samples=self.samples
            )
            try:
                yield make_plan(one, cluster=self.cluster, config=config, mesh=mesh, correction=correction)
            except PlanError as error:
                failures.append(error)


def measure_model(
    model: nn.Module,
    arguments: Arguments,
    *,
    loss: Callable[[Any], Tensor] | None,
    config: Config,
    grids: Sequence[Mesh],
) -> MeasuredModel:
    """Times the units of a model; collective over all ranks, in a run of one pipeline.

    Args:
        model: any module, with data or on the meta device.
        arguments: one batch of one replica.
        loss: as for `shardwright.torch.trace_model`.
        config: settings; a pinned number of microbatches is the only one.
        grids: that it may run on.

    Raises:
        PlanError: the batch cannot be cut into microbatches.
        TraceError: the model cannot be traced; the line is named.
    """
    run = context()
    assert run.reporter is not None
    batch = Batch(with_data(arguments, "cpu")).to(run.device)
    pipelines = sorted({mesh.pipeline for mesh in grids})
    with run.reporter.phase("tracing the model"):
        traces = {p: _traces(model, batch, loss, config, p, run.device) for p in pipelines}
    cluster = present_cluster(run)
    with run.reporter.phase("measuring units") as phase:
        together = [trace for of_pipeline in traces.values() for trace in of_pipeline.values()]
        costs = Profiler(run).measure(together, phase=phase)
    history = history_of(run)
    return MeasuredModel(
        candidates={p: _candidates(traces[p], costs, cluster) for p in pipelines},
        costs=costs,
        cluster=cluster,
        past_runs=() if history is None else history.read(),
        samples=batch.num_samples or 0,
    )


def _traces(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[Any], Tensor] | None,
    config: Config,
    pipeline: int,
    device: torch.device,
) -> dict[int, Trace]:
    """A trace for each number of microbatches."""
    if batch.num_samples is None:
        raise PlanError("the batch holds no tensor that can be cut into microbatches.")
    counts = microbatch_counts(batch.num_samples, config=config, pipeline=pipeline)
    return trace_parts(
        model,
        step_of(model, loss),
        {m: batch.split(m)[0] for m in counts},
        device=device,
        num_stages=pipeline * (config.virtual_stages or 2),
        count_memory=True,
    )


def _candidates(traces: Mapping[int, Trace], costs: Mapping[str, UnitCost], cluster: Cluster) -> Candidates:
    found: dict[int, Any] = {}
    for number, trace in traces.items():
        estimated = estimate_profile(trace.graph, device=cluster.device)
        profile = Profile(costs={**estimated.costs, **costs}, device=cluster.device.name)
        found[number] = (trace.graph, profile)
    return found

"""Plans a model for any grid of ranks, without running it: from estimated costs, or from measured ones."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.costs import MOMENT_BYTES
from shardwright.errors import PlanError, StalePlanError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan, TensorPrices
from shardwright.planner import (
    Candidates,
    best_of_meshes,
    estimate_profile,
    make_plan,
    meshes,
    microbatch_counts,
)
from shardwright.planner.closed_forms import expected_in_turn, expected_seconds
from shardwright.planner.degrees import with_or_without_sequences
from shardwright.planner.division import Division
from shardwright.planner.fabric import Fabric
from shardwright.planner.profiles import MeasuredProfile
from shardwright.profile import Profile
from shardwright.quantities import format_bytes
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.parameters.parameter_kinds import cast_inputs, low_precision
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.tracing.working_memory import WorkingMemory
from shardwright.torch.units.dry_run import OnAccelerators, in_precision, step_of, with_data
from shardwright.torch.units.model_traces import most_stages, trace_parts
from shardwright.torch.units.tensor_division import division_of


def plan_model(
    model: nn.Module,
    *args: Any,
    config: Config,
    world_size: int,
    cluster: Cluster,
    measured: MeasuredProfile | None = None,
    loss: Callable[[Any], Tensor] | None = None,
    search_degrees: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **kwargs: Any,
) -> Plan:
    """Plans a training run from earlier measurements, or from FLOPs, bytes and rates."""
    low, arguments = low_precision(config), with_data((args, kwargs), "cpu")
    if low is not None:
        model, arguments = in_precision(model, low), cast_inputs(arguments, low)
    planner = OfflinePlanner(
        model,
        arguments,
        config=config,
        cluster=cluster,
        measured=measured,
        loss=loss,
        progress=progress,
    )
    if not search_degrees:
        return planner.plan(config.resolve_world(world_size))
    grids = meshes(world_size, config, most_tensor=cluster.ranks_per_node)
    return best_of_meshes(grids, planner.plan, expected=planner.expected_seconds(grids))


class OfflinePlanner:
    """Plans grids of ranks for one model; traces it once for each number of pipeline ranks."""

    def __init__(
        self,
        model: nn.Module,
        arguments: Arguments,
        *,
        config: Config,
        cluster: Cluster,
        measured: MeasuredProfile | None = None,
        loss: Callable[[Any], Tensor] | None = None,
        progress: Callable[[int, int], None] | None = None,
    ):
        self._model = model
        self._batch = Batch(arguments)
        self._config = config
        self._cluster = cluster
        self._measured = measured
        self._loss = loss
        self._progress = progress
        self._candidates: dict[tuple[int, bool], Candidates] = {}
        self._traces: dict[tuple[int, bool], Trace] = {}
        self._divisions: dict[tuple[int, int, int, TensorPrices, object], Division] = {}
        self._memory: dict[str, WorkingMemory] = {}

    def plan(self, mesh: Mesh) -> Plan:
        units = pipeline, divides = mesh.pipeline, mesh.share > 1
        if units not in self._candidates:
            graphs = self._graphs(pipeline, self._counts(pipeline), divides=divides)
            self._candidates[units] = {m: (graph, self._profile(graph)) for m, graph in graphs.items()}
        plan = with_or_without_sequences(
            self._config,
            lambda config: self._plan(mesh, self._candidates[units], config),
            tensor=mesh.tensor,
        )
        return plan.model_copy(update={"why": (*plan.why, *self._assumptions(mesh))})

    def _plan(self, mesh: Mesh, candidates: Candidates, config: Config) -> Plan:
        copies = 0 if low_precision(self._config) is None else 1
        moments = 2 * MOMENT_BYTES[self._config.optimizer_state] / MOMENT_BYTES["as_is"]
        on_host = self._config.offload_optimizer and not self._cluster.cores_per_node
        return make_plan(
            candidates,
            cluster=self._cluster,
            config=config,
            mesh=mesh,
            optimizer_factor=0.0 if on_host else copies + moments,
            division=self._division(mesh, config, pipeline=mesh.pipeline) if mesh.share > 1 else None,
        )

    def expected_seconds(self, grids: Sequence[Mesh]) -> list[float]:
        """Seconds of each grid by closed forms, from one trace of one size of microbatches."""
        if len(grids) == 1:
            return [0.0]
        return expected_in_turn(grids, self._expected)

    def _expected(self, grids: Sequence[Mesh]) -> list[float]:
        divides = grids[0].tensor > 1
        longest = max(mesh.pipeline for mesh in grids)
        count = self._counts(longest)[0]
        graph = self._graphs(longest, [count], divides=divides)[count]
        of_degrees = {mesh.share: mesh for mesh in grids} if divides else {}
        return expected_seconds(
            graph,
            grids,
            cluster=self._cluster,
            config=self._config,
            samples=self._batch.num_samples or 0,
            profile=self._profile(graph),
            divisions={
                t: self._division(mesh, self._config, pipeline=longest) for t, mesh in of_degrees.items()
            },
        )

    def _division(self, mesh: Mesh, config: Config, *, pipeline: int) -> Division:
        """How the tensor-parallel ranks of a grid share the model, in units for so many pipeline ranks."""
        prices = Fabric(cluster=self._cluster, mesh=mesh).tensor_prices
        key = pipeline, mesh.share, mesh.context, prices, config.sequence_parallel
        if key not in self._divisions:
            self._divisions[key] = division_of(
                self._model,
                self._traces[pipeline, True],
                config=config,
                mesh=mesh,
                prices=prices,
                microbatches=self._counts(pipeline)[0],
            )
        return self._divisions[key]

    def _assumptions(self, mesh: Mesh) -> tuple[str, ...]:
        """The assumptions behind a plan whose profile is of fewer ranks."""
        measured = self._measured
        if measured is None or mesh.world_size <= measured.num_ranks:
            return ()
        hosts = -(-mesh.world_size // self._cluster.ranks_per_node)
        rate = format_bytes(int(self._cluster.inter_node.bandwidth_Bps))
        return (
            f"The profile was measured with {measured.num_ranks} ranks: {mesh.world_size} are taken to be on "
            f"{hosts} such hosts, with {rate}/s between them. Measure on as many to know.",
        )

    def _counts(self, pipeline: int) -> tuple[int, ...]:
        return counts_of(self._batch, config=self._config, pipeline=pipeline)

    def _graphs(
        self, pipeline: int, counts: Sequence[int], *, divides: bool = False
    ) -> dict[int, ModelGraph]:
        """The model in units for so many pipeline ranks, for each number of microbatches."""
        with nullcontext() if self._cluster.cores_per_node else OnAccelerators():
            traces = traces_of(
                self._model,
                self._batch,
                counts,
                loss=self._loss,
                config=self._config,
                units=(pipeline, divides),
                memory=self._memory,
                progress=self._progress,
            )
        self._traces.setdefault((pipeline, divides), next(iter(traces.values())))
        return {m: traces[m].graph for m in counts if m in traces}

    def _profile(self, graph: ModelGraph) -> Profile:
        estimated = estimate_profile(graph, device=self._cluster.device)
        if self._measured is None:
            return estimated
        if graph.model_fingerprint != self._measured.fingerprint:
            raise StalePlanError(
                f"the profile is of a model with fingerprint {self._measured.fingerprint}, but this one has "
                f"{graph.model_fingerprint}: other parameters, or other shapes, types or ties of them. "
                "Measure this one: shardwright profile"
            )
        known = {key: cost for key, cost in self._measured.costs.items() if key in estimated.costs}
        return Profile(costs={**estimated.costs, **known}, device=self._cluster.device.name)


def traces_of(
    model: nn.Module,
    batch: Batch,
    counts: Sequence[int],
    *,
    loss: Callable[[Any], Tensor] | None,
    config: Config,
    units: tuple[int, bool],
    device: torch.device | None = None,
    **options: Any,
) -> dict[int, Trace]:
    """A trace for each number of microbatches, in units for pipeline ranks that share layers or not."""
    pipeline, divides = units
    return trace_parts(
        model,
        step_of(model, loss),
        {m: batch.split(m)[0] for m in counts},
        device=device or torch.device("cpu"),
        num_stages=most_stages(config, pipeline=pipeline, divides=divides),
        divides=divides,
        loss_chunks=config.loss_chunks,
        **options,
    )


def counts_of(batch: Batch, *, config: Config, pipeline: int) -> tuple[int, ...]:
    """Into how many microbatches a batch may be cut."""
    if batch.num_samples is None:
        raise PlanError("the batch holds no tensor that can be cut into microbatches.")
    return microbatch_counts(batch.num_samples, config=config, pipeline=pipeline)

"""Plans a run from its first batch: finds units, traces, measures, and calls the planner.

::

    first batch ─► discover: what each module does ─► choose units ─┐
                                                                     ▼
        for each number of microbatches:           trace ─► graph ─► measure ─► profile
        (that of the last run alone, if there was one)               │
    plan ◄── broadcast to all ranks ◄── planner (on the first rank) ◄┘
"""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from shardwright.after_import import collector_paused
from shardwright.cluster import Cluster
from shardwright.comm.joining.process_group import tell_all
from shardwright.config import Config
from shardwright.costs import MOMENT_BYTES
from shardwright.costs.calibration import DIVIDED_OPERATION_S
from shardwright.errors import PlanError
from shardwright.observe.console import Phase
from shardwright.plan import Plan, TensorPrices
from shardwright.planner import (
    make_plan,
    microbatch_counts,
)
from shardwright.planner.degrees import with_or_without_sequences
from shardwright.planner.division import Division
from shardwright.planner.fabric import Fabric
from shardwright.run.context import Context
from shardwright.run.machine import cost_cache, present_cluster
from shardwright.run.memory import OwnCores
from shardwright.run.planning import placed_by_hand, plan_of_first_rank, profiles_of
from shardwright.run.profiler import Profiler, shares_cores
from shardwright.torch.batch.batch import Batch
from shardwright.torch.measuring.compiled_times import CompiledTimes, faster_of_both
from shardwright.torch.measuring.device_rates import measured_operation_s, measured_prices, update_costs
from shardwright.torch.measuring.host_costs import with_host_costs
from shardwright.torch.measuring.last_plan import LastPlan, memory_cache
from shardwright.torch.measuring.measure import TimesParts, on_copies
from shardwright.torch.offload.offloading import with_tier
from shardwright.torch.parameters.materialise import Materialiser
from shardwright.torch.parameters.parameter_kinds import low_precision
from shardwright.torch.parameters.unit_map import rank_of
from shardwright.torch.randomness import SKIPS_BY_PYTHON, own_generators
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.units.model_traces import most_stages, trace_parts
from shardwright.torch.units.tensor_division import division_of

log = logging.getLogger(__name__)

_OF_PARTS = 0.25
"""Share of the seconds for measuring that goes to parts of units at least, where ranks share layers."""


class Planner:
    """Plans a run from its first batch; collective over all ranks."""

    def __init__(self, context: Context, model: nn.Module, materialiser: Materialiser):
        self._context = context
        self._model = model
        self._materialiser = materialiser
        self._measured_s = 0.0

    def __call__(self, function: Callable[..., Any], batch: Batch) -> tuple[Plan, Trace | None]:
        """Returns the plan, the same on every rank, and the trace that it rests on.

        An evaluation that comes before training is planned as if it had gradients: the plan must do for
        both. Then no trace is returned, as that of the evaluation is another one.
        """
        context = self._context
        last = LastPlan(context, self._model, samples=batch.num_samples or 0)
        previous = context.from_first_rank(last.read)
        same = context.from_first_rank(lambda: last.is_of_this_code and previous is not None)
        counts = self._counts(batch)
        if previous is not None and previous.schedule.microbatches in counts:
            counts = (previous.schedule.microbatches,)
        assert context.reporter is not None
        with context.reporter.phase("tracing the model") as phase, collector_paused():
            trace_all = partial(self._trace, function, batch, counts, previous if same else None, phase)
            traces = self._as_in_training(trace_all)
            gradients = torch.is_grad_enabled() or traces is not None
            if traces is None:
                traces = trace_all()
        cluster = with_host_costs(context, with_tier(context, present_cluster(context, update_costs)))
        context.cluster = cluster
        with torch.set_grad_enabled(gradients):
            units = self._units(traces, previous)
        prices, operation_s = self._prices(cluster), self._operation_s()
        candidates = {m: (trace.graph, units.profiles[m]) for m, trace in traces.items()}
        plan_with = partial(
            make_plan,
            cluster=cluster,
            mesh=context.mesh,
            placement=placed_by_hand(
                traces[counts[0]].graph.units,
                lambda path: rank_of(self._model.get_submodule(path)),
                separator=".",
            ),
            optimizer_factor=_optimizer_factor(context),
        )
        with (
            context.reporter.phase("planning"),
            torch.set_grad_enabled(gradients),  # parts of units are run forward and backward
            _said_of_what_has_no_stage(traces[counts[0]]),
        ):
            parts = self._times_parts(next(iter(traces.values())), operation_s)
            plan = plan_of_first_rank(
                context,
                lambda: with_or_without_sequences(
                    context.config,
                    lambda config: plan_with(
                        candidates,
                        config=config,
                        division=self._division(traces, prices, config, previous, parts, operation_s),
                        previous=previous,
                    ),
                    previous=previous,
                ),
                on_all=parts is not None,
            )
            self._remember(parts)
        plan = plan.model_copy(
            update={"compiled": units.compiled, "why": (*plan.why, *filter(None, [units.why]))}
        )
        if context.rank == 0:
            last.write(plan)
        as_it_runs = gradients == torch.is_grad_enabled()
        return plan, traces[plan.schedule.microbatches] if as_it_runs else None

    def _counts(self, batch: Batch) -> tuple[int, ...]:
        config, pipeline = self._context.config, self._context.mesh.pipeline
        if batch.is_kept_whole:
            return (config.microbatches or 1,)
        if batch.num_samples is None:
            raise PlanError(
                "the step function gets no tensor that can be cut into microbatches"
                f"{batch.described_kinds}. Pass the batch as an argument, in tensors."
            )
        return microbatch_counts(batch.num_samples, config=config, pipeline=pipeline)

    def _as_in_training(self, trace: Callable[[], dict[int, Trace]]) -> dict[int, Trace] | None:
        """Traces an evaluation as if it trained, if training is to follow; None if not, or if it cannot."""
        if torch.is_grad_enabled() or not self._context.optimizers:
            return None
        modes = {module: module.training for module in self._model.modules()}
        try:
            self._model.train()  # layers that recompute themselves do so in training only
            with torch.enable_grad():
                return trace()
        except Exception as error:  # the user's code may insist on there being none
            log.info("the evaluation cannot be traced as training: %s", error)
            return None
        finally:
            for module, mode in modes.items():
                module.training = mode

    def _trace(
        self,
        function: Callable[..., Any],
        batch: Batch,
        counts: tuple[int, ...],
        same: Plan | None,
        phase: Phase,
    ) -> dict[int, Trace]:
        """Traces each number of microbatches; in the units of a plan that is of the same code."""
        context = self._context
        divides = context.mesh.share > 1
        trained = torch.is_grad_enabled()  # what is counted has a backward
        cache = memory_cache(context)
        memory = cache.read() if trained else {}
        known = len(memory)
        traces = trace_parts(
            self._model,
            function,
            {m: batch.split(m)[0] for m in counts},
            device=context.device,
            num_stages=most_stages(context.config, pipeline=context.mesh.pipeline, divides=divides),
            divides=divides,
            units=None if same is None else same.unit_names,
            prepare=self._materialiser.buffers_outside,
            memory=memory,
            loss_chunks=context.config.loss_chunks,
            progress=lambda done, total: phase.update(done, total=total),
            agree_on_end=_first_of_all_ranks if context.mesh.world_size > 1 else None,
        )
        if context.rank == 0 and trained and len(memory) > known:
            cache.write({key: each for key, each in memory.items() if each.weight_bytes is not None})
        return traces

    def _units(self, traces: dict[int, Trace], previous: Plan | None) -> CompiledTimes:
        context, begun_s = self._context, time.perf_counter()
        whole = 1.0 if context.mesh.share == 1 else 1.0 - _OF_PARTS
        budget_s = context.config.measure_s * whole
        profiles = profiles_of(
            context,
            traces,
            profiler=lambda: Profiler(context, time_class=on_copies(context)),
            budget_s=budget_s,
            again=previous is not None,
        )
        found = faster_of_both(context, self._model, traces, profiles, budget_s=budget_s, previous=previous)
        self._measured_s = time.perf_counter() - begun_s
        return found

    def _prices(self, cluster: Cluster) -> TensorPrices | None:
        """What tensor-parallel ranks pay; collective over all ranks. None where there are none."""
        context = self._context
        if context.mesh.share == 1:
            return None
        if context.config.profile == "estimated":
            return Fabric(cluster=cluster, mesh=context.mesh).tensor_prices
        return measured_prices(context)

    def _operation_s(self) -> float:
        """What an operation on divided tensors takes beyond its own time; collective over all ranks."""
        context = self._context
        if context.mesh.share == 1 or context.config.profile == "estimated":
            return DIVIDED_OPERATION_S
        return measured_operation_s(context)

    def _division(
        self,
        traces: dict[int, Trace],
        prices: TensorPrices | None,
        config: Config,
        previous: Plan | None,
        parts: TimesParts | None,
        operation_s: float,
    ) -> Division | None:
        """How tensor-parallel ranks share the model; None where there are none.

        The prices by which the last run decided decide again: those of today are a little different, and the
        placements that they lead to may be others, with other sums.
        """
        if prices is None:
            return None
        microbatches, trace = next(iter(traces.items()))
        if parts is not None:
            parts.left_s = parts.budget_s
        last = None if previous is None else previous.tensor
        found = division_of(
            self._model,
            trace,
            config=config,
            mesh=self._context.mesh,
            prices=prices,
            decided_by=None if last is None else last.prices,
            microbatches=microbatches,
            time_part=parts,
        )
        return replace(found, operation_s=operation_s)

    def _times_parts(self, trace: Trace, operation_s: float) -> TimesParts | None:
        """What times parts of units, with what earlier runs have found; collective over all ranks."""
        context = self._context
        if context.mesh.share == 1 or context.config.profile == "estimated":
            return None
        measure_s = context.config.measure_s
        num_ways = 2 if context.config.sequence_parallel == "auto" else 1  # each with parts of its own
        return TimesParts(
            device=context.device,
            share_cores=shares_cores(context),
            operation_s=operation_s,
            samples=trace.samples,
            generators=own_generators(draw for step in trace.steps for draw in step.draws),
            budget_s=max(measure_s * _OF_PARTS, measure_s - self._measured_s) / num_ways,
            remembered=context.from_first_rank(cost_cache(context).read),
            on_own_cores=OwnCores(context).in_force,
        )

    def _remember(self, parts: TimesParts | None) -> None:
        if parts is not None and parts.found and self._context.rank == 0:
            cache = cost_cache(self._context)
            cache.write({**cache.read(), **parts.found})


@contextmanager
def _said_of_what_has_no_stage(trace: Trace) -> Iterator[None]:
    """Says in errors of plans why a step function has not called all of the model in its trace."""
    try:
        yield
    except PlanError as error:
        used = {name for unit in trace.graph.units.values() for name in unit.parameters}
        if used.issuperset(trace.graph.parameters):
            raise
        if trace.end.line:
            raise PlanError(
                f"{error} The step function reads a value at {trace.end.line}, where its trace ends: what it "
                "calls behind that has no stage. Call the whole model first, and read values then. Where the "
                "model's own forward reads it, put that and the layers behind it into a module inside, which "
                "is one unit, or choose by torch.where. Replicas alone take any model."
            ) from error
        if trace.random.python_at:
            raise PlanError(f"{error} {SKIPS_BY_PYTHON}") from error
        raise


def _first_of_all_ranks(place: float) -> float:
    return float(min(tell_all(place)))


def _optimizer_factor(context: Context) -> float:
    """Bytes of optimizer state for each byte of what is updated; a copy in float32 is a part of it."""
    if context.config.offload_optimizer and context.device.type != "cpu":
        return 0.0
    copies = 1.0 if low_precision(context.config) is not None else 0.0
    moment = MOMENT_BYTES[context.config.optimizer_state] / MOMENT_BYTES["as_is"]
    for wrapped in context.optimizers:
        name = type(wrapped.optimizer).__name__
        if name == "SGD":
            momentum = any(group.get("momentum") for group in wrapped.param_groups)
            return copies + (moment if momentum else 0.0)
    return copies + 2 * moment

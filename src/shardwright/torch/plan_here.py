"""Plans for the current machines: measures the model, tries the best plans, keeps the fastest.

::

    measure ─► closed forms ─► plan each grid that they leave, with every number of microbatches
                                                                    │
                                                                    ▼
                                             the best few by prediction ─► run some steps of each
                                                                    │
                                                                    ▼
                                                the plan with most samples a second, as measured
"""

import datetime
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.config import Config
from shardwright.errors import ShardwrightError
from shardwright.mesh import Mesh
from shardwright.observe.console import Console, Phase
from shardwright.plan import Plan, Trial
from shardwright.planner import best_plans, estimate_profile, meshes
from shardwright.planner.profiles import MeasuredProfile
from shardwright.quantities import format_seconds
from shardwright.run.context import context
from shardwright.run.joint_calls import require_all_refuse
from shardwright.run.machine import present_cluster
from shardwright.run.profiler import Profiler, ToProfile
from shardwright.run.startup import shutdown
from shardwright.torch.batch.batch import Arguments, Batch
from shardwright.torch.measuring.device_rates import update_costs
from shardwright.torch.measuring.host_costs import with_host_costs
from shardwright.torch.measuring.measure import on_copies
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.offload.offloading import with_tier
from shardwright.torch.startup import begin
from shardwright.torch.step_function import step
from shardwright.torch.units.dry_run import loss_of, with_data
from shardwright.torch.units.offline_planner import OfflinePlanner, counts_of, traces_of

_NEAR_TIE = 1.01
_CLOSE = 1.1
_QUIET = "SHARDWRIGHT_QUIET"
_WARM_UP_STEPS = 2
_TRIALS = itertools.count()


@dataclass(frozen=True, slots=True)
class Training:
    """The training to plan.

    Attributes:
        build: makes the model, the same on every rank.
        arguments: one batch of one replica.
        loss: makes one number of what the model returns; None as for `shardwright.torch.trace_model`.
    """

    build: Callable[[], nn.Module]
    arguments: Arguments
    loss: Callable[[Any], Tensor] | None = None


def plan_here(training: Training, *, config: Config, most: int, steps: int) -> Plan:
    """Finds the fastest plan on the present machines; collective over all ranks, without a run.

    Each replica has a batch of its own, as a training script loads it: what counts are samples a second.
    """
    with _run_of_one_pipeline(config):
        measured = _measured(training, config)
        run = context()
        grids = _grids(config)
        finalists = run.from_first_rank(
            lambda: best_plans(grids, measured.plans, most=most, expected=measured.expected_seconds(grids))
        )
    plans: list[Plan] = []
    seconds: list[float] = []
    refusals: list[tuple[Plan, ShardwrightError]] = []
    for number, plan in enumerate(finalists, start=1):
        title = f"trying plan {number} of {len(finalists)}"
        try:
            seconds.append(try_plan(training, plan, config=config, steps=steps, title=title))
            plans.append(plan)
        except ShardwrightError as error:  # the runtime does not run it
            require_all_refuse(error, attempt=f"trial {next(_TRIALS)}")
            refusals.append((plan, error))
        else:
            next(_TRIALS)
    if not plans:
        raise refusals[0][1]
    for number in _close(plans, seconds):
        title = f"trying plan {number + 1} again"
        again_s = try_plan(training, plans[number], config=config, steps=steps, title=title)
        seconds[number] = min(seconds[number], again_s)
    best = _verdict(plans, seconds, steps)
    told = tuple(f"Could not be tried: {title_of(plan)}: {error}" for plan, error in refusals)
    return best.model_copy(update={"why": (*best.why, *told)})


def _close(plans: Sequence[Plan], seconds: Sequence[float]) -> list[int]:
    """Those that a slow moment of the machine may have put in the wrong order, the last tried first."""
    of_sample = [s / plan.mesh.data for plan, s in zip(plans, seconds, strict=True)]
    found = [n for n, each in enumerate(of_sample) if each <= min(of_sample) * _CLOSE]
    return list(reversed(found)) if len(found) > 1 else []


def measure_here(training: Training, *, config: Config) -> OfflinePlanner:
    """Times the model of a training on the present machines; collective over all ranks, without a run."""
    with _run_of_one_pipeline(config):
        return _measured(training, config)


def _measured(training: Training, config: Config) -> OfflinePlanner:
    """Times the units of a model; collective over all ranks, in a run of one pipeline.

    ::

        for each number of pipeline ranks:  units ─► traces, one for each number of microbatches ─┐
                                                                                                  ▼
                                    `OfflinePlanner` ◄── their costs ◄── all units, timed together
    """
    run, model = context(), training.build()
    assert run.reporter is not None
    arguments = with_data(training.arguments, "cpu")
    batch = Batch(arguments).to(run.device)
    kinds = sorted({(mesh.pipeline, mesh.share > 1) for mesh in _grids(config)})
    with run.reporter.phase("tracing the model"):
        traces = {
            kind: traces_of(
                model,
                batch,
                counts_of(batch, config=config, pipeline=kind[0]),
                loss=training.loss,
                config=config,
                units=kind,
                device=run.device,
                memory={},
            )
            for kind in kinds
        }
    cluster = with_host_costs(run, with_tier(run, present_cluster(run, update_costs)))
    with run.reporter.phase("measuring units") as phase:
        sizes = [
            ToProfile(m, trace, estimate_profile(trace.graph, device=cluster.device))
            for of_pipeline in traces.values()
            for m, trace in of_pipeline.items()
        ]
        # Each way to cut the model into units has classes of its own.
        budget_s = run.config.measure_s * len(kinds)
        costs = Profiler(run, time_class=on_copies(run)).measure(sizes, budget_s=budget_s, phase=phase)
    profile = MeasuredProfile(
        fingerprint=sizes[0].trace.graph.model_fingerprint,
        costs={**{key: cost for size in sizes for key, cost in size.estimated.costs.items()}, **costs},
        cluster=cluster,
        num_ranks=run.mesh.world_size,
        when=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}",
    )
    return OfflinePlanner(
        model,
        arguments,
        config=config,
        cluster=cluster,
        measured=profile,
        loss=training.loss,
        traces=traces,
    )


def _grids(config: Config) -> list[Mesh]:
    """The grids of the present ranks that settings leave open; ranks of a host may share layers."""
    run = context()
    return meshes(run.mesh.world_size, config, most_tensor=run.local_size)


@contextmanager
def _run_of_one_pipeline(config: Config) -> Iterator[None]:
    """A run in which every rank is a part of one pipeline, whatever the degrees are to be."""
    degrees = {
        "pipeline_parallel_degree": None,
        "data_parallel_degree": None,
        "tensor_parallel_degree": 1,
        "context_parallel_degree": 1,
        "expert_parallel_degree": 1,
        "sharded_data_parallel_degree": 1,
    }
    begin(_traceless(config).model_copy(update=degrees), None)
    try:
        yield
    finally:
        shutdown()


def _traceless(config: Config) -> Config:
    """Settings of a run that leaves nothing behind."""
    return Config.merge(config, {"run_dir": "off", "log_interval": 10**9})


def try_plan(training: Training, plan: Plan, *, config: Config, steps: int, title: str) -> float:
    """Runs a plan for some steps; collective over all ranks, without a run."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(prints=is_first)
    with console.phase(f"{title}: {title_of(plan)}") as phase, _silence():
        begin(_traceless(config), plan)
        try:
            return _timed(training, steps, phase)
        finally:
            shutdown()


def _timed(training: Training, steps: int, phase: Phase) -> float:
    device = context().device
    model = DistributedModel(training.build())
    args, kwargs = with_data(training.arguments, "cpu")

    @step
    def trial_step(model: DistributedModel, *args: object, **kwargs: object) -> Tensor:
        value = loss_of(model(*args, **kwargs), training.loss)
        model.backward(value)
        return value

    times = []
    for number in range(_WARM_UP_STEPS + steps):
        phase.update(number + 1, total=_WARM_UP_STEPS + steps)
        model.zero_grad(set_to_none=True)
        _wait_for_all(device)
        start = time.perf_counter()
        trial_step(model, *args, **kwargs)
        _wait_for_device(device)
        times.append(time.perf_counter() - start)
    return _slowest(statistics.median(times[_WARM_UP_STEPS:]), device)


@contextmanager
def _silence() -> Iterator[None]:
    """Runs say nothing: of a trial, only that it goes on is of interest."""
    before = os.environ.get(_QUIET)
    os.environ[_QUIET] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_QUIET]
        else:
            os.environ[_QUIET] = before


def _wait_for_all(device: torch.device) -> None:
    _wait_for_device(device)
    if dist.is_initialized():
        dist.barrier()


def _wait_for_device(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _slowest(seconds: float, device: torch.device) -> float:
    if not dist.is_initialized():
        return seconds
    found = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return float(found.item())


def _verdict(plans: Sequence[Plan], seconds: Sequence[float], steps: int) -> Plan:
    """The plan with most samples a second; of near ties, the one that was predicted to be faster."""
    of_sample = [s / plan.mesh.data for plan, s in zip(plans, seconds, strict=True)]
    best = next(n for n, each in enumerate(of_sample) if each <= min(of_sample) * _NEAR_TIE)
    trials = tuple(_trial(plan, s, steps) for plan, s in zip(plans, seconds, strict=True))
    winner = plans[best]
    trials = (trials[best], *trials[:best], *trials[best + 1 :])
    return winner.model_copy(
        update={"trials": trials, "why": (*winner.why, _sentence(plans, of_sample, best))}
    )


def _trial(plan: Plan, seconds: float, steps: int) -> Trial:
    assert plan.prediction is not None
    return Trial(
        mesh=plan.mesh,
        schedule=plan.schedule,
        step_s=seconds,
        predicted_s=plan.prediction.step_s,
        steps=steps,
    )


def _sentence(plans: Sequence[Plan], of_sample: Sequence[float], best: int) -> str:
    others = [
        f"{title_of(plan)} {each / of_sample[best] - 1:+.1%}"
        for number, (plan, each) in enumerate(zip(plans, of_sample, strict=True))
        if number != best
    ]
    text = (
        f"Tried on the present machines: {title_of(plans[best])}, {format_seconds(of_sample[best])} a batch"
    )
    return f"{text}; {', '.join(others)}." if others else f"{text}."


def title_of(plan: Plan) -> str:
    """A plan in a few words: ``pipeline 2 x data 1, 8 microbatches, zb_v with 4 stages``."""
    mesh = plan.mesh
    shared = mesh.shared_title
    shared += f", ZeRO-3 over {mesh.shard}" if mesh.shard > 1 else ""
    stages = len(plan.stages)
    how = f", {plan.schedule.kind} with {stages} stages" if stages > 1 else ""
    count = plan.schedule.microbatches
    cut = f"{count} microbatch{'es' * (count != 1)}"
    return f"pipeline {mesh.pipeline} x data {mesh.data}{shared}, {cut}{how}"

"""What each rank of `planner.py` does: some steps of one configuration, beside what its plan predicts."""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SHARDWRIGHT_CACHE", "off")  # costs are measured in this run

import torch
import torch.distributed as dist
from torch import Tensor, nn

import shardwright.torch as sw
from live_bytes import HeapBytes
from models import Task, conv_net, gpt
from shardwright.cli.asking.factory import Sample
from shardwright.cli.asking.measuring_ranks import measured
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.observe.console import Console, Phase
from shardwright.plan import Plan
from shardwright.planner import meshes, microbatch_counts
from shardwright.planner.profiles import MeasuredProfile
from shardwright.run.context import context
from shardwright.run.joining import shutdown
from shardwright.torch.model.distributed_model import DistributedModel
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.startup import begin
from shardwright.torch.step_function import step
from shardwright.torch.units.dry_run import loss_of, with_data
from shardwright.torch.units.offline_planner import OfflinePlanner
from shardwright_side import Ours

__all__ = ["TASKS", "all_tried", "predicted_and_measured", "predicted_and_used_bytes"]

TASKS = {
    "gpt": gpt(batch=8),
    "wide gpt": gpt(layers=6, width=384, vocab=4096, batch=8),
    "conv net": conv_net(),
    "large vocabulary": gpt(layers=4, vocab=16384, batch=8),
}
_WARM_UP = 2
_CONTENDERS = 4  # of those that took least
_VERIFIED = 3  # of those that are predicted to take least


def predicted_and_measured(task: str, settings: Mapping[str, Any], steps: int) -> tuple[float, float, str]:
    """Seconds of a step as the plan has them, their median over some steps, and what was chosen."""
    trained = TASKS[task]
    ours = Ours(trained, trained.build(), {"plan_one_stage": True, "log_interval": 10**6, **settings})
    times = []
    for number in range(_WARM_UP + steps):
        dist.barrier()
        start = time.perf_counter()
        ours.step()
        if number >= _WARM_UP:
            times.append(time.perf_counter() - start)
    plan = ours.plan
    assert plan.prediction is not None
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    chosen = f"{plan.schedule.kind}, {plan.schedule.microbatches} microbatches, {len(plan.stages)} stages"
    return plan.prediction.step_s, statistics.median(times), chosen + (", recomputed" if recomputed else "")


def predicted_and_used_bytes(task: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Peak bytes of this rank as the plan has them, and those in use over a step with AdamW."""
    trained = TASKS[task]
    with HeapBytes() as live:
        sw.init({"run_dir": "off", "plan_one_stage": True, "profile": "estimated", **settings})
        model = sw.DistributedModel(trained.build())
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters()))

        @sw.step
        def train(model: sw.DistributedModel, x: Tensor, y: Tensor) -> None:
            model.backward(trained.loss(model(x), y))

        def step() -> None:
            optimizer.zero_grad()
            train(model, *batch)
            optimizer.step()

        batch = trained.batch()
        for _ in range(_WARM_UP):
            step()
        gc.collect()
        with live.counted():
            step()
    run = context()
    assert run.plan is not None
    assert run.plan.prediction is not None
    shared = 0 if run.links.local_peers is None else run.links.local_peers.num_bytes
    shared += sum(_shared_part(parameter) for parameter in model.local_parameters())
    return run.plan.prediction.memory[run.pipeline_rank].peak_bytes, live.peak + shared


def _shared_part(parameter: Tensor) -> int:
    """Bytes of the rows of a shared parameter: they are in memory that ranks share, not the allocator's."""
    return parameter.local.nbytes if isinstance(parameter, ShardedTensor) else 0


class _WithLoss(nn.Module):
    """A model that returns its loss."""

    def __init__(self, trained: Task):
        super().__init__()
        self.model = trained.build()
        self._loss = trained.loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Of inputs and targets."""
        return self._loss(self.model(x), y)


def all_tried(task: str, steps: int, rounds: int) -> list[tuple[str, float, list[float]]]:
    """What every grid of ranks with every number of microbatches takes, the best by prediction first.

    Everything is tried once. What may be the best, and what is predicted to be, is tried again in turn, so
    that a slow moment of the machine strikes all of them alike, and none wins by a lucky one.

    Returns:
        For each, its name and the seconds for a batch of a replica: predicted, and measured in every round.
    """
    trained, config = TASKS[task], Config()

    def make() -> Sample:
        return Sample(_WithLoss(trained), trained.batch(), {}, None)

    profile = measured(make, config)
    grids = meshes(dist.get_world_size(), config, most_tensor=int(os.environ["LOCAL_WORLD_SIZE"]))
    plans: list[Any] = [
        sorted(_plans(grids, make(), profile), key=lambda p: p.prediction.step_s / p.mesh.data)
    ]
    dist.broadcast_object_list(plans, src=0)
    (plans,) = plans
    found: list[list[float]] = [[] for _ in plans]

    def go(numbers: Iterable[int], title: str) -> None:
        for number in numbers:
            seconds = try_plan(make, plans[number], config=config, steps=steps, title=title)
            found[number].append(seconds / plans[number].mesh.data)

    go(range(len(plans)), "trying")
    order = sorted(range(len(plans)), key=lambda number: found[number][0])
    contenders = sorted({*order[:_CONTENDERS], *range(min(_VERIFIED, len(plans)))})
    for turn in range(rounds):
        go(contenders if turn % 2 else reversed(contenders), f"round {turn + 1} of {rounds}")
    return [
        (title_of(plan), plan.prediction.step_s / plan.mesh.data, seconds)
        for plan, seconds in zip(plans, found, strict=True)
    ]


def main() -> None:
    """Under torchrun: rank 0 writes the figures to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--settings", type=json.loads, help="without them, everything is tried")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=0, help="in which the best are tried again")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found: Any = (
        all_tried(options.task, options.steps, options.rounds)
        if options.settings is None
        else predicted_and_measured(options.task, options.settings, options.steps)
    )
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _plans(grids: Iterable[Mesh], sample: Sample, profile: MeasuredProfile) -> Iterator[Plan]:
    """The plan of each grid for each number of microbatches that has one."""
    samples = sample.args[0].shape[0]
    for grid in grids:
        for count in microbatch_counts(samples, config=Config(), pipeline=grid.pipeline):
            planner = OfflinePlanner(
                sample.model,
                (sample.args, sample.kwargs),
                config=Config.parse({"microbatches": count}),
                cluster=profile.cluster,
                measured=profile,
            )
            with suppress(PlanError):
                yield planner.plan(grid)


_QUIET = "SHARDWRIGHT_QUIET"
_WARM_UP_STEPS = 2


def try_plan(make: Callable[[], Sample], plan: Plan, *, config: Config, steps: int, title: str) -> float:
    """Runs a plan for some steps; collective over all ranks, without a run."""
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    console = Console(prints=is_first)
    with console.phase(f"{title}: {title_of(plan)}") as phase, _silence():
        begin(Config.merge(config, {"run_dir": "off", "log_interval": 10**9}), plan)
        try:
            return _timed(make(), steps, phase)
        finally:
            shutdown()


def _timed(sample: Sample, steps: int, phase: Phase) -> float:
    device = context().device
    model = DistributedModel(sample.model)
    args, kwargs = with_data((sample.args, sample.kwargs), "cpu")

    @step
    def trial_step(model: DistributedModel, *args: object, **kwargs: object) -> Tensor:
        value = loss_of(model(*args, **kwargs), sample.loss)
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


def title_of(plan: Plan) -> str:
    """A plan in a few words: ``pipeline 2 x data 1, 8 microbatches, zb_v with 4 stages``."""
    mesh = plan.mesh.grid
    shared = mesh.shared_title
    shared += f", ZeRO-3 over {mesh.shard}" if mesh.shard > 1 else ""
    stages = len(plan.stages)
    how = f", {plan.schedule.kind} with {stages} stages" if stages > 1 else ""
    count = plan.schedule.microbatches
    cut = f"{count} microbatch{'es' * (count != 1)}"
    return f"pipeline {mesh.pipeline} x data {mesh.data}{shared}, {cut}{how}"


if __name__ == "__main__":
    sys.exit(main())

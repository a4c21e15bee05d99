"""What each rank of `planner.py` does: some steps of one configuration, beside what its plan predicts."""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
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
from shardwright.config import Config
from shardwright.planner import best_plans, meshes
from shardwright.run.context import context
from shardwright.torch.parameters.sharded_tensor import ShardedTensor
from shardwright.torch.plan_here import Training, measure_here, title_of, try_plan
from shardwright_side import Ours

__all__ = ["TASKS", "all_tried", "predicted_and_measured", "predicted_and_used_bytes"]

TASKS = {
    "gpt": gpt(batch=8),
    "wide gpt": gpt(layers=6, width=384, vocab=4096, batch=8),
    "conv net": conv_net(),
    "large vocabulary": gpt(layers=4, vocab=16384, batch=8),
}
_WARM_UP = 2
_ALL = 50
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
    training = Training(build=lambda: _WithLoss(trained), arguments=(trained.batch(), {}))
    measured = measure_here(training, config=config)
    grids = meshes(dist.get_world_size(), config, most_tensor=int(os.environ["LOCAL_WORLD_SIZE"]))
    plans: list[Any] = [best_plans(grids, measured.plans, most=_ALL)]
    dist.broadcast_object_list(plans, src=0)
    (plans,) = plans
    found: list[list[float]] = [[] for _ in plans]

    def go(numbers: Iterable[int], title: str) -> None:
        for number in numbers:
            seconds = try_plan(training, plans[number], config=config, steps=steps, title=title)
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


if __name__ == "__main__":
    sys.exit(main())

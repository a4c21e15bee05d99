"""What each rank of `planner.py` does: some steps of one configuration, beside what its plan predicts."""

import argparse
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("SHARDWRIGHT_CACHE", "off")  # costs are measured in this run

import torch
import torch.distributed as dist

import shardwright.torch as sw
from live_bytes import LiveBytes
from models import conv_net, gpt
from shardwright.torch.context import context
from shardwright_side import Ours

__all__ = ["TASKS", "predicted_and_live_bytes", "predicted_and_measured"]

TASKS = {
    "gpt": gpt(batch=8),
    "wide gpt": gpt(layers=6, width=384, vocab=4096, batch=8),
    "conv net": conv_net(),
}
_WARM_UP = 2


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


def predicted_and_live_bytes(task: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Peak bytes of this rank as the plan has them, and live ones over a step with AdamW; see `memory`."""
    trained = TASKS[task]
    settings = {"plan_one_stage": True, "profile": "estimated", **settings}
    with LiveBytes() as live:
        ours = Ours(trained, trained.build(), settings)
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(ours.model.local_parameters()))
        for _ in range(_WARM_UP):
            ours.step()
            optimizer.step()
        gc.collect()
        with live.counted():
            ours.step()
            optimizer.step()
    run = context()
    peers = run.local_peers
    shared = 0 if peers is None else peers.num_bytes
    assert ours.plan.prediction is not None
    return ours.plan.prediction.memory[run.pipeline_rank].peak, live.peak + shared


def main() -> None:
    """Under torchrun: rank 0 writes the figures to a file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    found = predicted_and_measured(options.task, options.settings, options.steps)
    if dist.get_rank() == 0:
        options.out.write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())

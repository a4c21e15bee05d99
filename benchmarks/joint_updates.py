"""What the update of an optimizer takes that needs all parameters, where each rank of a pipeline has some.

    OMP_NUM_THREADS=1 python benchmarks/joint_updates.py [--steps 10]

It is run over the parameters of all stages on all ranks. Prodigy (of the package prodigyopt) updates the
model of ``make demo``: in one process, and over two stages. Its step size is a sum over all parameters, and
each number that it reads costs a message.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from machine import circumstances
from shardwright.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))


def measure(steps: int) -> tuple[list[float], list[float], int]:
    """Seconds of the clock of each step function and of each update, and how many parameters are here."""
    from prodigyopt import Prodigy

    import shardwright.torch as sw
    from train_gpt import build

    sw.init({"run_dir": "off", "log_interval": 10**6, "profile": "estimated", "microbatches": 4})
    torch.manual_seed(0)
    net, batch = build()
    ids = torch.randint(4096, batch["input_ids"].shape)
    model = sw.DistributedModel(net)
    optimizer = sw.DistributedOptimizer(Prodigy(model.parameters()))

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(input_ids=x, labels=x).loss
        model.backward(loss)
        return loss

    times, updates = [], []
    for _ in range(steps + 2):
        begin_s = time.perf_counter()
        optimizer.zero_grad()
        train(model, ids)
        middle_s = time.perf_counter()
        optimizer.step()
        times.append(middle_s - begin_s)
        updates.append(time.perf_counter() - middle_s)
    return times[2:], updates[2:], len(list(model.local_parameters()))


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    print(circumstances())
    for num_ranks in (1, 2):
        for rank, (steps, updates, num_parameters) in enumerate(
            run_ranks(measure, num_ranks, arguments.steps, timeout_s=600)
        ):
            print(
                f"{num_ranks} stages, rank {rank}: {num_parameters:3} parameters, step function "
                f"{statistics.median(steps) * 1e3:7.1f} ms, update {statistics.median(updates) * 1e3:6.1f} ms"
            )


if __name__ == "__main__":
    main()

"""What it costs to look at every training step: loss and gradients, and the numbers of optimizers.

    OMP_NUM_THREADS=1 python benchmarks/checks.py [--steps 20] [--ranks 2]

Seconds of the processor, of the main thread: those of the looks, as a share of those of steps and updates.
Others that keep the machine busy change neither much.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from machine import circumstances
from shardwright.testing import run_ranks

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

Made = tuple[nn.Module, tuple[Tensor, Tensor], Callable[[Any, Tensor, Tensor], Tensor]]


def demo() -> Made:
    """The model of ``make demo``: batches of 16 sequences of 64 tokens."""
    from train_gpt import build

    model, batch = build()
    ids = torch.randint(4096, batch["input_ids"].shape)
    return model, (ids, ids), lambda model, x, y: model(input_ids=x, labels=y).loss


def perceptron(width: int = 2048, depth: int = 6, rows: int = 512) -> Made:
    """Layers of a width: of all that a step does, gradients are the most."""
    layers = [each for _ in range(depth) for each in (nn.Linear(width, width), nn.ReLU())]
    x = torch.randn(rows, width)
    return nn.Sequential(*layers), (x, torch.randn(rows, width)), lambda m, x, y: F.mse_loss(m(x), y)


MODELS: dict[str, Callable[[], Made]] = {"demo": demo, "perceptron": perceptron}


def measure(name: str, steps: int, config: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each step, of the look at its gradients, and of that at the numbers of the optimizer."""
    import shardwright.torch as sw

    sw.init({"run_dir": "off", "log_interval": 10**6, "profile": "estimated", "microbatches": 4, **config})
    torch.manual_seed(0)
    net, batch, loss_of = MODELS[name]()
    model = sw.DistributedModel(net)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-4))

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    looks, numbers = [], []
    end: Any = model.step_end
    _timed(end.finiteness, "look", looks)
    _timed(end.numbers, "digests", numbers)
    times = []
    for _ in range(steps + 3):
        begin_s = time.thread_time()
        optimizer.zero_grad(set_to_none=True)
        train(model, *batch)
        optimizer.step()
        times.append(time.thread_time() - begin_s)
    return times[3:], looks[3:], numbers[3:]


def _timed(owner: Any, method: str, found: list[float]) -> None:
    """Writes down how long each call takes."""
    original = getattr(owner, method)

    def call(*args: Any) -> Any:
        begin_s = time.thread_time()
        result = original(*args)
        found.append(time.thread_time() - begin_s)
        return result

    setattr(owner, method, call)


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    print(circumstances())
    layouts: dict[str, dict[str, Any]] = {"stages": {}, "replicas": {"data_parallel_degree": arguments.ranks}}
    for name in MODELS:
        for layout, config in layouts.items():
            ranks = run_ranks(measure, arguments.ranks, name, arguments.steps, config, timeout_s=600)
            for rank, (steps, looks, numbers) in enumerate(ranks):
                step, look, number = map(statistics.median, (steps, looks, numbers))
                print(
                    f"{name:<11} {layout:<9} rank {rank}: step {step * 1e3:7.1f} ms, gradients "
                    f"{look * 1e3:6.3f} ms ({look / step:.2%}), numbers {number * 1e3:6.3f} ms "
                    f"({number / step:.2%})"
                )


if __name__ == "__main__":
    main()

"""What it costs to look at every training step: loss and gradients, and the numbers of optimizers.

    OMP_NUM_THREADS=1 python benchmarks/checks.py [--steps 20] [--ranks 2] [--paired]

1. Seconds of the processor, of the main thread: those of the looks, as a share of those of steps and updates.
   Others that keep the machine busy change neither much.
2. With ``--paired``, seconds of the clock instead: every other step leaves the look at loss and gradients
   out. A rank that would wait for others anyway looks for nothing; this shows it. On a quiet machine only.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
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


def prepare(name: str, config: dict[str, Any]) -> tuple[Any, Callable[[], None]]:
    """A wrapped model, and what makes a step of it with its update."""
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

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        train(model, *batch)
        optimizer.step()

    for _ in range(3):
        step()
    return model, step


def measure(name: str, steps: int, config: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """Seconds of each step, of the look at its gradients, and of that at the numbers of the optimizer."""
    model, step = prepare(name, config)
    times, looks, numbers = [], [], []
    _timed(model.step_end.finiteness, "look", looks)
    _timed(model.step_end.numbers, "digests", numbers)
    for _ in range(steps):
        begin_s = time.thread_time()
        step()
        times.append(time.thread_time() - begin_s)
    return times, looks, numbers


def measure_pairs(name: str, steps: int, config: dict[str, Any]) -> list[tuple[float, float]]:
    """Seconds of the clock of steps with the look and without it, one after the other, either first."""
    model, step = prepare(name, config)
    finiteness = model.step_end.finiteness
    zero = torch.zeros((), dtype=torch.float64)
    looks = {True: finiteness.look, False: lambda losses: (zero, zero)}
    pairs = []
    for i in range(steps):
        took = {}
        for looked in (True, False) if i % 2 else (False, True):
            finiteness.look = looks[looked]
            begin_s = time.perf_counter()
            step()
            took[looked] = time.perf_counter() - begin_s
        pairs.append((took[True], took[False]))
    return pairs


def _timed(owner: Any, method: str, found: list[float]) -> None:
    """Writes down how long each call takes."""
    original = getattr(owner, method)

    def call(*args: Any) -> Any:
        begin_s = time.thread_time()
        result = original(*args)
        found.append(time.thread_time() - begin_s)
        return result

    setattr(owner, method, call)


def compared(pairs: Sequence[tuple[float, float]]) -> str:
    """The middle of what the look adds to a step, with the standard error of a median."""
    shares = sorted(with_look / without - 1 for with_look, without in pairs)
    error = 1.253 * statistics.stdev(shares) / len(shares) ** 0.5
    return (
        f"step {statistics.median(without for _, without in pairs) * 1e3:7.1f} ms, the look adds "
        f"{statistics.median(shares):+.2%} +- {error:.2%} ({len(shares)} pairs)"
    )


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--paired", action="store_true", help="seconds of the clock, with and without")
    arguments = parser.parse_args()
    print(circumstances())
    layouts: dict[str, dict[str, Any]] = {"stages": {}, "replicas": {"data_parallel_degree": arguments.ranks}}
    for name in MODELS:
        for layout, config in layouts.items():
            if arguments.paired:
                ranks = run_ranks(
                    measure_pairs, arguments.ranks, name, arguments.steps, config, timeout_s=600
                )
                print(f"{name:<11} {layout:<9} {compared(ranks[0])}")
                continue
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

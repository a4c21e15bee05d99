"""What it costs that a step function reads values of tensors, over the stages of a pipeline.

    OMP_NUM_THREADS=1 python benchmarks/reading_steps.py [--rounds 25] [--ranks 2]

Step functions of one wrapped model take turns, on all ranks. Ratios are to the function that reads nothing,
round by round.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from machine import circumstances
from models import gpt
from shardwright.testing import run_ranks

_MICROBATCHES = 8


def _loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


def reads_nothing(model: Any, x: Tensor, y: Tensor) -> Any:
    """Returns the tensor."""
    loss = _loss(model, x, y)
    model.backward(loss)
    return loss


def returns_a_number(model: Any, x: Tensor, y: Tensor) -> Any:
    """Reads behind its backward."""
    loss = _loss(model, x, y)
    model.backward(loss)
    return loss.item()


def looks_for_nan(model: Any, x: Tensor, y: Tensor) -> Any:
    """Reads before it."""
    loss = _loss(model, x, y)
    if torch.isnan(loss):
        return loss.detach()
    model.backward(loss)
    return loss


def counts_what_is_right(model: Any, x: Tensor, y: Tensor) -> Any:
    """Reads two numbers before it, of which one takes all logits."""
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    right = logits.argmax(-1).eq(y).sum()
    numbers = loss.item(), right.item()
    model.backward(loss)
    return numbers


def computes_behind_a_read(model: Any, x: Tensor, y: Tensor) -> Any:
    """Every rank needs all logits then, and computes the loss."""
    logits = model(x)
    if logits.abs().max().item() > 1e4:
        raise RuntimeError("the logits are too large")
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    model.backward(loss)
    return loss


FUNCTIONS: tuple[Callable[..., Any], ...] = (
    reads_nothing,
    returns_a_number,
    looks_for_nan,
    counts_what_is_right,
    computes_behind_a_read,
)


def measure(rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, round by round."""
    import shardwright.torch as sw

    settings = {"pipeline_parallel_degree": dist.get_world_size(), "microbatches": _MICROBATCHES}
    sw.init({"run_dir": "off", "log_interval": 10**6, "pipeline": "1f1b", **settings})
    task = gpt(layers=8, width=128, length=128, batch=8)
    model = sw.DistributedModel(task.build())
    batch = task.batch()
    steps = {each.__name__: sw.step(each) for each in FUNCTIONS}
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds + 2):
        names = list(steps) if turn % 2 else list(reversed(steps))
        for name in names:
            model.zero_grad(set_to_none=True)
            dist.barrier()
            begin = time.perf_counter()
            steps[name](model, *batch)
            dist.barrier()
            if turn > 1:  # the first ones plan, trace, and warm up
                found[name].append(time.perf_counter() - begin)
    return found


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--ranks", type=int, default=2)
    arguments = parser.parse_args()
    print(circumstances())
    found = run_ranks(measure, arguments.ranks, arguments.rounds, timeout_s=600)[0]
    plain = found[reads_nothing.__name__]
    for name, seconds in found.items():
        each = [one / other for one, other in zip(seconds, plain, strict=True)]
        low, median, high = statistics.quantiles(each, n=4)
        ms = statistics.median(seconds) * 1e3
        print(f"{name:24} {ms:8.2f} ms    {median:.3f} ({low:.3f} to {high:.3f})")


if __name__ == "__main__":
    main()

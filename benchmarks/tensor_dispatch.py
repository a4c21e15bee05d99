"""What a divided tensor costs an operation, in microseconds of Python above plain PyTorch.

One process, no communication, small tensors, so that nothing but the dispatch is measured: 7 operations of
a forward (product, ReLU, views, sum), and the same with their backward; in a loop, and each seven after a
product of large matrices, which pushes their code out of the caches as a layer's products do. Beside it a
subclass that only unwraps and wraps (the floor of any tensor in Python) and torch's DTensor.

    python benchmarks/tensor_dispatch.py [--json] [--check]
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.placement import Cut
from shardwright.torch.tensor_parallel.divide import tensor_group
from shardwright.torch.tensor_parallel.divided_tensor import divided

ROUNDS = 10
NUM_OPERATIONS = 7 * ROUNDS
LIMIT_US = 25.0


class Bare(Tensor):
    """Unwraps its arguments and wraps the result."""

    local: Tensor

    @staticmethod
    def __new__(cls, local: Tensor) -> "Bare":
        made = Tensor._make_wrapper_subclass(cls, local.shape, strides=local.stride(), dtype=local.dtype)
        made.local = local
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        own = [each.local if type(each) is Bare else each for each in args]
        return Bare(func(*own, **(kwargs or {})))


def chain(x: Tensor, w: Tensor, rounds: int = ROUNDS) -> Tensor:
    for _ in range(rounds):
        x = torch.relu(torch.mm(x, w))
        rows = x.shape[0]
        x = x.view(rows, 2, 4).transpose(1, 2).transpose(1, 2).view(rows, 8) + 1.0
    return x


def microseconds(run: Callable[[], Any], *, repeats: int = 60) -> float:
    """The fastest of several runs, by operation."""
    run()
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.process_time()
        run()
        best = min(best, time.process_time() - start)
    return best * 1e6 / NUM_OPERATIONS


def between_products(chains: dict[str, Callable[[], Any]], *, repeats: int = 200) -> dict[str, float]:
    """The medians of all, in turns, by operation."""
    matrix = torch.randn(512, 512)
    times: dict[str, list[float]] = {name: [] for name in chains}
    for _ in range(repeats):
        for name, run in chains.items():
            torch.mm(matrix, matrix)
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(each) * 1e6 / (NUM_OPERATIONS // ROUNDS) for name, each in times.items()}


def both_ways(x: Tensor, w: Tensor) -> Callable[[], None]:
    leaf = w.detach().requires_grad_()
    return lambda: chain(x, leaf).sum().backward()


def measure() -> dict[str, dict[str, float]]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    torch.set_num_threads(1)
    x, w = torch.randn(4, 8), torch.randn(8, 8)
    group = tensor_group()
    cut = Cut.even(0, 8, num_ranks=2)
    mesh = init_device_mesh("cpu", (2,))
    tensors: dict[str, tuple[Tensor, Tensor]] = {
        "plain": (x, w),
        "bare subclass": (Bare(x), Bare(w)),
        "DTensor": (distribute_tensor(x, mesh, [Replicate()]), distribute_tensor(w, mesh, [Replicate()])),
        # The rows are cut, so every result is; a whole weight is an ordinary tensor.
        "divided tensor": (divided(torch.randn(8, 8), cut, group), w),
    }
    found = {
        name: {
            "forward_us": microseconds(lambda a=a, b=b: chain(a, b)),
            "forward_and_backward_us": microseconds(both_ways(a, b)),
        }
        for name, (a, b) in tensors.items()
    }
    cold = between_products({name: lambda a=a, b=b: chain(a, b, 1) for name, (a, b) in tensors.items()})
    for name, row in found.items():
        row["forward_between_products_us"] = cold[name]
    dist.destroy_process_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    parser.add_argument("--check", action="store_true", help=f"fail above {LIMIT_US} us an operation")
    options = parser.parse_args()
    found = measure()
    above = found["divided tensor"]["forward_us"] - found["plain"]["forward_us"]
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        print(f"{'us an operation':<16}{'forward':>10}{'and backward':>14}{'between products':>18}")
        for name, row in found.items():
            loop, both, cold = row.values()
            print(f"{name:<16}{loop:>10.1f}{both:>14.1f}{cold:>18.1f}")
        print(f"above plain PyTorch: {above:.1f} us")
    if options.check and above > LIMIT_US:
        raise SystemExit(f"a divided tensor costs {above:.1f} us an operation, more than {LIMIT_US:.0f}")


if __name__ == "__main__":
    main()

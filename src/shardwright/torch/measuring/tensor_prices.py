"""Measures how fast the ranks of a tensor-parallel group exchange, and compute."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from shardwright.comm.joining.process_group import tell_all
from shardwright.placement import WHOLE, PartialSum
from shardwright.plan import TensorPrices
from shardwright.torch.run.context import Context
from shardwright.torch.run.machine import seconds_of_products
from shardwright.torch.tensor_parallel.divide import tensor_group
from shardwright.torch.tensor_parallel.redistribution import replaced

__all__ = ["measured_prices"]

_SMALL, _LARGE = 64, 512 * 1024
"""Elements of 4 bytes: little more than a latency, and the activations of a layer."""

_MOVED = 8 * 2**20
"""Elements that no cache holds."""

_RUNS = 9
_PRODUCT_FLOPS = {"cpu": 2 * 512**3, "cuda": 2 * 4096**3}


def measured_prices(context: Context) -> TensorPrices:
    """The prices of the tensor-parallel groups; collective over all ranks, which all get the same."""
    group, device = tensor_group(context.groups.tensor), context.device
    small, large = (torch.zeros(size, device=device) for size in (_SMALL, _LARGE))

    def sums(data: torch.Tensor) -> Callable[[], Any]:
        # As the run does it: with the copy that is added up, in memory of its own.
        given: Any = {"shape": data.shape, "strides": data.stride(), "source": PartialSum(), "target": WHOLE}
        return partial(replaced, group, data, **given)

    latency_s = _seconds(sums(small), device)
    bytes_s = max(_seconds(sums(large), device) - latency_s, 1e-9)
    moved = torch.zeros(_MOVED, device=device)
    moved_s = _seconds(lambda: moved.add_(1), device)
    mine = [latency_s, bytes_s, seconds_of_products(device), moved_s]
    latency_s, bytes_s, products_s, moved_s = (
        statistics.median(column) for column in zip(*tell_all(mine), strict=True)
    )
    num_ranks = context.mesh.share
    return TensorPrices(
        latency_s=latency_s,
        bandwidth_Bps=2 * (num_ranks - 1) / num_ranks * large.nbytes / bytes_s,
        flops_per_s=_PRODUCT_FLOPS[device.type] / products_s,
        memory_Bps=2 * moved.nbytes / moved_s,
    )


def _seconds(call: Callable[[], Any], device: torch.device) -> float:
    """The median of some calls, which all ranks begin together."""
    times = []
    dist.barrier()
    for _ in range(1 + _RUNS):  # the first warms up
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])

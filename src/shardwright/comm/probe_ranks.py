"""The rank process of ``shardwright probe``; it measures rates alone and with all ranks busy.

Ranks that share cores, caches and memory slow one another down: training sees the joint rate.

torchrun can start it too: ``torchrun ... -m shardwright.comm.probe_ranks prices.json``.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright.cluster import Rate
from shardwright.collectives.prices import DevicePrices, typical_device_prices, write_prices
from shardwright.comm._private import has_nccl
from shardwright.comm.collective_probe import measure_device_prices, measure_prices
from shardwright.comm.collectives.communicator import Communicator
from shardwright.comm.collectives.connect import connect
from shardwright.comm.collectives.device_collectives import DeviceCollectives
from shardwright.comm.collectives.device_lanes import CUDA
from shardwright.comm.joining.process_group import (
    default_store,
    destroy_process_group,
    init_process_group,
    tell_all,
)
from shardwright.comm.launchers import detect

DTYPES = ("float32", "bfloat16", "float16")

# (rows, inner, columns): square ones, and what a few samples and a wide layer make.
_CPU_SIZES = (
    *((n, n, n) for n in (64, 128, 256, 512, 1024)),
    (2048, 256, 256),
    (64, 1024, 1024),
)
_DEVICE_SIZES = (
    *((n, n, n) for n in (256, 512, 1024, 2048, 4096, 8192)),
    (16384, 1024, 1024),
    (128, 8192, 8192),
)
_ENOUGH_S = 0.03
_LONGEST_S = 0.3
_ROUNDS = 3
_COPY_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class MemoryRates:
    """Bytes a second.

    Attributes:
        memory_Bps: read and written in large copies, while all ranks of the host copy.
        host_Bps: from the host to the device, the slower direction; 0 where they are one.
    """

    memory_Bps: float
    host_Bps: float


def measure_products(device: torch.device, dtype: str, *, progress: Callable[[], None]) -> tuple[Rate, ...]:
    """Rates of matrix products by size; collective over all ranks.

    Sizes stop where one product takes a third of a second: some devices have no fast products of a dtype.
    """
    found = []
    sizes = _CPU_SIZES if device.type == "cpu" else _DEVICE_SIZES
    for rows, inner, columns in sizes:
        call = _product(device, dtype, rows, inner, columns)
        first_s = _worst(None if call is None else _seconds(call, device, 1))
        if call is None or first_s is None or first_s > _LONGEST_S:
            break
        flops = 2.0 * rows * inner * columns
        together = _timed(call, device, everyone=True)
        alone = _timed(call, device, everyone=False)
        rate = Rate(rows=rows, inner=inner, columns=columns, alone=flops / alone, together=flops / together)
        found.append(rate)
        progress()
    return tuple(found)


def measure_memory_rates(device: torch.device) -> MemoryRates:
    """Measures the rates of reading and writing memory, of the slowest rank; collective over all ranks."""
    source = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    memory_s = _timed(lambda: target.copy_(source), device, everyone=True)
    host_Bps = 0.0
    if device.type != "cpu":
        pinned = torch.zeros(_COPY_BYTES, dtype=torch.uint8).pin_memory()
        ways: list[Callable[[], Tensor]] = [
            lambda: target.copy_(pinned, non_blocking=True),
            lambda: pinned.copy_(source, non_blocking=True),
        ]
        host_Bps = _COPY_BYTES / max(_timed(way, device, everyone=True) for way in ways)
    return MemoryRates(memory_Bps=2 * _COPY_BYTES / memory_s, host_Bps=host_Bps)


def _product(
    device: torch.device, dtype: str, rows: int, inner: int, columns: int
) -> Callable[[], Tensor] | None:
    kind = getattr(torch, dtype)
    try:
        a = torch.randn(rows, inner, device=device).to(kind)
        b = torch.randn(inner, columns, device=device).to(kind)
        output = a @ b
    except RuntimeError:  # no kernel for it, or no room
        return None
    return lambda: torch.matmul(a, b, out=output)


def _timed(call: Callable[[], object], device: torch.device, *, everyone: bool) -> float:
    """Seconds of a call: the fastest of some rounds, on the slowest rank."""
    number = max(1, int(_ENOUGH_S / max(_seconds(call, device, 1), 1e-7)))
    best = float("inf")
    for turn in _turns(everyone):
        _barrier()
        if turn:
            best = min(best, *(_seconds(call, device, number) for _ in range(_ROUNDS)))
    found = _worst(best)
    assert found is not None
    return found


def _turns(everyone: bool) -> Iterator[bool]:
    """Whether it is the turn of this rank; alone, the first and the last of the ranks stand for all."""
    if everyone or not dist.is_initialized():
        yield True
        return
    last = dist.get_world_size() - 1
    for rank in sorted({0, last}):
        yield dist.get_rank() == rank


def _seconds(call: Callable[[], object], device: torch.device, number: int) -> float:
    _synchronize(device)
    start = time.perf_counter()
    for _ in range(number):
        call()
    _synchronize(device)
    return (time.perf_counter() - start) / number


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _worst(seconds: float | None) -> float | None:
    """The most seconds of all ranks that have any; None where one of them cannot."""
    if not dist.is_initialized():
        return seconds
    found: list[float | None] = tell_all(seconds)
    if any(each is None for each in found):
        return None
    return max((each for each in found if each != float("inf") and each is not None), default=None)


log = logging.getLogger(__name__)

_TIMEOUT_S = 120.0


def main() -> None:
    """Measures prices; rank 0 writes them to the file that the first argument names."""
    init_process_group(detect(os.environ), backend="gloo", timeout_s=_TIMEOUT_S)
    group = connect(
        PrefixStore("probe", default_store()),
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        timeout_s=_TIMEOUT_S,
    )
    prices = replace(measure_prices(group), devices=device_prices(group))
    if dist.get_rank() == 0:
        write_prices(sys.argv[1], prices, group.topology)
    dist.barrier()
    group.close()
    destroy_process_group()


def device_prices(group: Communicator) -> DevicePrices | None:
    """Prices of GPUs; None where not every rank has one for itself."""
    place = detect(os.environ)
    number = torch.cuda.device_count() if has_nccl() else 0
    if not all(tell_all(place.local_world_size <= number)):
        if number and place.local_rank == 0:
            log.warning(
                "collectives on GPUs are not measured: ranks share GPUs on a host (here %d ranks, %d GPUs). "
                "Start one rank for each GPU: shardwright probe -n %d",
                place.local_world_size,
                number,
                number,
            )
        return None
    device = torch.device("cuda", place.local_rank)
    torch.cuda.set_device(device)
    devices = DeviceCollectives(
        PrefixStore("probe of devices", default_store()),
        rank=group.rank,
        topology=group.topology,
        prices=typical_device_prices(group.topology),
        accelerator=CUDA,
        thread=group.thread,
        timeout_s=_TIMEOUT_S,
    )
    try:
        return measure_device_prices(devices, device)
    finally:
        devices.shutdown()


if __name__ == "__main__":
    main()

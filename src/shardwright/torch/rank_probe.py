"""The rank process of ``shardwright probe``: rates alone and with all ranks busy, links, collectives.

Ranks that share cores, caches and memory slow one another down: training sees the joint rate.

torchrun can start it too::

    torchrun ... -m shardwright.torch.rank_probe prices.json cluster.yaml
"""

import datetime
import logging
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright import __version__
from shardwright.cluster import Accelerator, Cluster, Inventory, NodeKind, Rate
from shardwright.cluster.cluster_file import write_inventory
from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.prices import DevicePrices, Prices, typical_device_prices, write_prices
from shardwright.comm._private import has_nccl
from shardwright.comm.codec import declare
from shardwright.comm.collective_probe import measure_device_prices, measure_prices
from shardwright.comm.collectives.communicator import Communicator
from shardwright.comm.collectives.connect import connect
from shardwright.comm.collectives.device_collectives import DeviceCollectives
from shardwright.comm.collectives.device_lanes import CUDA
from shardwright.comm.joining.process_group import (
    default_store,
    tell_all,
)
from shardwright.comm.launchers import detect
from shardwright.config import Config
from shardwright.observe.console import Console
from shardwright.quantities import cores_of_host, counted
from shardwright.run.context import Context, context
from shardwright.run.joining import shutdown
from shardwright.run.machine import device_name, present_cluster
from shardwright.torch.measuring.device_rates import update_costs
from shardwright.torch.startup import begin

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
    """Rates of matrix products by size; collective over all ranks."""
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
    if not dist.is_initialized():
        return seconds
    found: list[float | None] = tell_all(seconds)
    if any(each is None for each in found):
        return None
    return max((each for each in found if each != float("inf") and each is not None), default=None)


log = logging.getLogger(__name__)

_TIMEOUT_S = 120.0


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


_MOST_SIZES = 8
_MEMORY_STEP = 64 * 2**20
_SIZES = (4 * 1024, 64 * 1024, 1024 * 1024, 16 * 1024 * 1024)  # bytes of the whole
# The first that is in a name: B200 is in GB200, too.
_FAMILIES = ("V100", "A100", "H100", "H200", "GB200", "B200", "B300", "L40S", "MI300X")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Host:
    """One rank's report on its host and device; ranks of one kind differ in rates alone.

    Attributes:
        is_cpu: ranks compute on cores of the host.
        memory_bytes: of the device, or this rank's part of the host's.
    """

    device: str
    is_cpu: bool
    ranks: int
    cores: int
    memory_bytes: int
    number: int


def main() -> None:
    """Measures; rank 0 writes prices to the first argument, and machines to the second."""
    prices_file, cluster_file = sys.argv[1:3]
    begin(Config.parse({"run_dir": "off"}), None)
    run = context()
    console = Console(prints=run.rank == 0)
    with console.phase("probing products of matrices") as phase:
        number = 0

        def progress() -> None:
            nonlocal number
            number += 1
            phase.update(number, total=len(DTYPES) * _MOST_SIZES)

        products = {dtype: measure_products(run.device, dtype, progress=progress) for dtype in DTYPES}
    with console.phase("probing memory"):
        memory = measure_memory_rates(run.device)
    with console.phase("probing links"):
        cluster = present_cluster(run, update_costs)
    with console.phase("probing collectives"):
        group, prices = _collectives(run)
    hosts = run.from_all_ranks(_host(run, cluster))
    if run.rank == 0:
        machines = _inventory(hosts, cluster, products, memory)
        if group is not None and prices is not None:
            machines = replace(machines, collectives=_seconds_of_collectives(group, prices))
            write_prices(prices_file, prices, group.topology)
        write_inventory(cluster_file, machines)
    if group is not None:
        dist.barrier()
        group.close()
    shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def _collectives(run: Context) -> tuple[Communicator | None, Prices | None]:
    if run.mesh.world_size == 1:
        return None, None
    group = connect(
        PrefixStore("probe", default_store()),
        rank=run.rank,
        num_ranks=run.mesh.world_size,
        timeout_s=_TIMEOUT_S,
    )
    return group, replace(measure_prices(group), devices=device_prices(group))


def _seconds_of_collectives(group: Communicator, prices: Prices) -> dict[str, tuple[tuple[int, float], ...]]:
    """The seconds of each collective's best algorithm, by the bytes of the whole; of NCCL on GPUs."""
    found = {}
    if prices.devices is not None:
        for name, line in prices.devices.everyone.items():
            found[name] = tuple((size, line.seconds(size)) for size in _SIZES)
        return found
    group.use(prices)
    for name in COLLECTIVES:
        pieces = group.topology.num_ranks if name in ("all_gather", "reduce_scatter") else 1
        found[name] = tuple(
            (size, group.choice(name, max(1, size // 4 // pieces), 4).seconds) for size in _SIZES
        )
    return found


declare(_Host)


def _host(run: Context, cluster: Cluster) -> _Host:
    return _Host(
        device=device_name(run.device),
        is_cpu=run.device.type == "cpu",
        ranks=run.local_size,
        cores=cores_of_host(),
        # Equal machines differ by some pages, and are of one kind all the same.
        memory_bytes=cluster.device.memory_bytes // _MEMORY_STEP * _MEMORY_STEP,
        number=run.rank // run.local_size,
    )


def _inventory(
    hosts: Iterable[_Host],
    cluster: Cluster,
    products: dict[str, tuple[Rate, ...]],
    memory: MemoryRates,
) -> Inventory:
    """The machines; rates are those of the slowest rank, so kinds of hosts differ in what they are alone."""
    numbers: dict[_Host, set[int]] = defaultdict(set)
    for host in hosts:
        numbers[replace(host, number=0)].add(host.number)
    rates = {dtype: each for dtype, each in products.items() if each}
    nodes = []
    for host, of_kind in numbers.items():
        chip = Accelerator(
            name=host.device,
            family="cpu" if host.is_cpu else _family(host.device),
            flops_per_s={dtype: max(rate.together for rate in each) for dtype, each in rates.items()},
            memory_bytes=host.memory_bytes,
            memory_Bps=memory.memory_Bps,
            host_Bps=memory.host_Bps,
            source="measured",
            products=rates,
        )
        kind = NodeKind(
            name=host.device,
            accelerator=chip,
            num_accelerators=host.ranks,
            link_Bps=cluster.intra_node.bandwidth_Bps,
            link_latency_s=cluster.intra_node.latency_s,
            network_Bps=cluster.inter_node.bandwidth_Bps,
            network_latency_s=cluster.inter_node.latency_s,
            memory_bytes=host.memory_bytes * host.ranks if host.is_cpu else 0,
            cores=host.cores if host.is_cpu else 0,
            source="measured",
        )
        nodes.append((kind, len(of_kind)))
    now = datetime.datetime.now(datetime.UTC)
    how = (
        f"{now:%Y-%m-%d %H:%M UTC}, shardwright {__version__} probe, torch {torch.__version__}, "
        f"{counted(torch.get_num_threads(), 'thread')} a rank, {platform.system()}"
    )
    name = " + ".join(f"{kind.name} x {number}" for kind, number in nodes)
    return Inventory(name=name, nodes=tuple(nodes), measured=how)


def _family(device: str) -> str:
    return next((family for family in _FAMILIES if family in device), device)


if __name__ == "__main__":
    main()

"""The rank process of ``shardwright probe``: times products, memory, links and collectives.

torchrun can start it too::

    torchrun ... -m shardwright.torch.rank_probe prices.json cluster.yaml
"""

import datetime
import platform
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright import __version__
from shardwright.cluster import Accelerator, Cluster, Inventory, NodeKind, Rate
from shardwright.cluster.cluster_file import write_inventory
from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.prices import Prices, write_prices
from shardwright.comm.codec import declare
from shardwright.comm.collective_probe import measure_prices
from shardwright.comm.collectives.communicator import Communicator
from shardwright.comm.collectives.connect import connect
from shardwright.comm.joining.process_group import default_store
from shardwright.comm.probe_ranks import (
    DTYPES,
    MemoryRates,
    device_prices,
    measure_memory_rates,
    measure_products,
)
from shardwright.config import Config
from shardwright.observe.console import Console
from shardwright.quantities import cores_of_host, counted
from shardwright.run.context import Context, context
from shardwright.run.joining import shutdown
from shardwright.run.machine import device_name, present_cluster
from shardwright.torch.measuring.device_rates import update_costs
from shardwright.torch.startup import begin

_TIMEOUT_S = 120.0
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

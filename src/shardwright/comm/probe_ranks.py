"""The rank process of ``shardwright probe``.

torchrun can start it too: ``torchrun ... -m shardwright.comm.probe_ranks prices.json``.
"""

import logging
import os
import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

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

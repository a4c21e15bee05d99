"""What each rank of ``shardwright probe`` does.

torchrun may start it, too: ``torchrun ... -m shardwright.comm.probe_ranks prices.json``.
"""

import sys

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from shardwright.collectives.prices_file import write_prices
from shardwright.comm.connect import connect
from shardwright.comm.probe import measure_prices
from shardwright.comm.process_group import default_store

__all__ = ["main"]

_TIMEOUT_S = 120.0


def main() -> None:
    """Measures prices; rank 0 writes them to the file that the first argument names."""
    dist.init_process_group("gloo")
    group = connect(
        PrefixStore("probe", default_store()),
        rank=dist.get_rank(),
        num_ranks=dist.get_world_size(),
        timeout_s=_TIMEOUT_S,
    )
    prices = measure_prices(group)
    if dist.get_rank() == 0:
        write_prices(sys.argv[1], prices, group.topology)
    dist.barrier()
    group.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Tells whether an error of one rank is an error of all."""

import datetime

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from shardwright.comm.joining.process_group import default_store
from shardwright.errors import PeerLostError, ShardwrightError

__all__ = ["require_all_refuse"]

_PATIENCE = datetime.timedelta(seconds=20)


def require_all_refuse(
    error: ShardwrightError, *, attempt: str, patience: datetime.timedelta = _PATIENCE
) -> None:
    """Returns once all ranks have refused the same attempt; to be called by each that does.

    A rank that fails alone must not go on: the others wait for it inside of the attempt.
    """
    if isinstance(error, PeerLostError):
        raise error
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    store = PrefixStore(f"refusals of {attempt}", default_store())
    store.set(str(dist.get_rank()), "")
    try:
        store.wait([str(rank) for rank in range(dist.get_world_size())], patience)
        for rank in range(dist.get_world_size()):
            store.get(str(rank))  # a stranger may have written it
    except RuntimeError as timeout:  # DistStoreError, or what else a store raises that is gone
        error.add_note(f"This rank alone refuses: others did not within {patience.total_seconds():.0f} s.")
        raise error from timeout

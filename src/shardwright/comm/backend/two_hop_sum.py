"""Reduces gradients in two hops: within a shard group, then over its replicas.

::

    hop 1   reduce-scatter inside of the shard group     every rank gets the sum of its own part
    hop 2   all-reduce of that part over the replicas    of other shard groups

The second hop carries 1 / shard of the data of an all-reduce over all ranks, and overlaps the next first hop:
each hop has its own thread and, mostly, its own links.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardwright.comm._private import reduce_scatter_single
from shardwright.comm.backend.shardwright_process_group import ShardwrightProcessGroup

__all__ = ["TwoHopSum"]


class TwoHopSum:
    """Starts to sum; the groups' other collectives may follow at once."""

    def __init__(
        self,
        data: Tensor,
        *,
        earlier: Tensor | None,
        shard_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
    ):
        self._earlier = earlier
        self._sum = data.new_empty(data.numel() // dist.get_world_size(shard_group))
        self._replica_group = replica_group
        self._first: Any = reduce_scatter_single(self._sum, data, group=shard_group, async_op=True)
        self._both: Future[Any] | None = None
        if isinstance(replica_group, ShardwrightProcessGroup) and data.device.type == "cpu":
            # Its thread keeps the order in which the first hops end, which is the same on all ranks.
            replicas = replica_group.communicator

            def hop(first: "Future[Any]") -> "Future[Any]":
                first.value()
                return replicas.thread.submit(second)

            def second() -> None:
                self._add_earlier()
                replicas.all_reduce(self._sum)

            self._both = self._first.get_future().then(hop)

    def wait_for_part(self) -> None:
        """Waits for the first hop, and lets go of the earlier sum where no other hop follows."""
        self._first.wait()
        if self._replica_group is None:
            self._add_earlier()

    def wait(self) -> Tensor:
        """Waits for both hops; returns (n,), the sum of this rank's part."""
        self._first.wait()
        if self._both is not None:
            self._both.wait().wait()
            return self._sum
        self._add_earlier()
        if self._replica_group is not None:
            dist.all_reduce(self._sum, group=self._replica_group)
        return self._sum

    def _add_earlier(self) -> None:
        if self._earlier is not None:
            self._sum.add_(self._earlier)
            self._earlier = None

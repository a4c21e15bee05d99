"""The sum of gradients in two hops: over the ranks that share a shard group, then over its replicas.

::

    hop 1   reduce-scatter inside of the shard group     every rank gets the sum of its own part
    hop 2   all-reduce of that part over the replicas    of other shard groups

The second hop carries 1 / shard of what an all-reduce over all ranks does, and goes on while the first hop of
what follows does: the two have threads, and mostly links, of their own.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardwright.comm.shardwright_process_group import ShardwrightProcessGroup

__all__ = ["TwoHopSum"]


class TwoHopSum:
    """Starts to sum; the groups' other collectives may follow at once.

    Args:
        output: (n,), gets the sum of this rank's part.
        data: (n * ranks of the shard group,), part by part; nobody may write to it before the end.
        shard_group: the ranks that share.
        replica_group: the ranks that have the same part; None where there is only this one.
    """

    def __init__(
        self,
        output: Tensor,
        data: Tensor,
        *,
        shard_group: dist.ProcessGroup,
        replica_group: dist.ProcessGroup | None,
    ):
        self._output = output
        self._replica_group = replica_group
        self._first: Any = dist.reduce_scatter_tensor(output, data, group=shard_group, async_op=True)
        self._second: Future[Any] | None = None
        if isinstance(replica_group, ShardwrightProcessGroup):
            # Its thread keeps the order in which the first hops end, which is the same on all ranks.
            replicas = replica_group.communicator

            def hop(first: "Future[Any]") -> "Future[Any]":
                first.value()
                return replicas.thread.submit(lambda: replicas.all_reduce(output))

            self._second = self._first.get_future().then(hop)
            self._replica_group = None

    def wait(self) -> None:
        """Waits for both hops.

        Raises:
            PeerLostError: a rank has ended.
        """
        self._first.wait()
        if self._second is not None:
            self._second.wait().wait()
        elif self._replica_group is not None:
            dist.all_reduce(self._output, group=self._replica_group)

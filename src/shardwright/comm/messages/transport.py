"""Point-to-point messages between the ranks of a pipeline.

Messages from one rank to another form a channel and keep their order: the n-th receive posted at one end gets
the n-th tensor sent at the other. Receives are posted ahead of need and sends return at once, so transfers
overlap compute. On CPUs, a pipeline on one host sends through shared memory. A pipeline over several hosts
sends everything through process groups: a rank that waits in one takes nothing from shared memory meanwhile,
where others may first have to get rid of a message.

NCCL runs the messages between two ranks in the order in which they were issued: a receive posted ahead would
hold up a send to the same rank, and two ranks that both post receives first would wait for ever. With one
process group per direction, messages up and down the pipeline do not meet.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.absence.peer_loss import lost_peer
from shardwright.comm.encoding.tensor_bytes import bytes_of
from shardwright.comm.one_host.local_peers import LocalPeers
from shardwright.errors import PeerLostError

__all__ = ["Receipt", "Transport"]

_TAG_LIMIT = 2**30
# Sends whose memory is held at most. Waiting for the oldest cannot deadlock: schedules are proved under
# rendezvous (`schedule.validate`).
_MOST_PENDING = 4


class Receipt:
    """A receive that was posted: `wait` gives the tensor."""

    __slots__ = ("_finish", "_tensor")

    def __init__(self, tensor: Tensor, finish: Callable[[], object] | None):
        self._tensor = tensor
        self._finish = finish

    def wait(self) -> Tensor:
        """Blocks until the tensor has arrived."""
        if self._finish is not None:
            self._finish()
            self._finish = None
        return self._tensor


class Transport:
    """Sends and receives tensors between the ranks of one pipeline.

    Attributes:
        local: ways to the other ranks of the pipeline through shared memory; None where messages take others.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        rank: int,
        up: dist.ProcessGroup | None = None,
        down: dist.ProcessGroup | None = None,
        local: LocalPeers | None = None,
    ):
        self._ranks = tuple(ranks)
        self._rank = rank
        self._up, self._down = up, down
        here = local is not None and all(other in local for other in ranks if other != self._ranks[rank])
        self.local = local if here else None
        self._sent = [0] * len(ranks)
        self._expected = [0] * len(ranks)
        self._pending: deque[tuple[dist.Work, Tensor, int]] = deque()

    def send(self, tensor: Tensor, target: int) -> None:
        """Starts sending a tensor to a pipeline rank; its memory is held until it has left.

        Where several sends are under way, waits until the first of them has left.
        """
        if tensor.numel() == 0:
            return
        if self.local is not None:
            self.local.send(tensor.detach(), self._ranks[target])
            return
        payload = bytes_of(tensor)
        tag = self._sent[target] % _TAG_LIMIT
        self._sent[target] += 1
        # Gloo tells whether a send has completed only to those that wait for it. The oldest has mostly left.
        while len(self._pending) >= _MOST_PENDING or (self._pending and self._pending[0][0].is_completed()):
            self._finish_oldest()
        try:
            group = self._up if target > self._rank else self._down
            work = dist.isend(payload, self._ranks[target], group=group, tag=tag)
        except RuntimeError as error:
            raise _lost("sending to", self._ranks[target], error) from error
        assert work is not None
        self._pending.append((work, payload, target))

    def post_receive(
        self, shape: Sequence[int], source: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> Receipt:
        """Announces that the next tensor from a pipeline rank can be taken."""
        buffer = torch.empty(tuple(shape), dtype=dtype, device=device)
        if buffer.numel() == 0:
            return Receipt(buffer, None)
        world_rank = self._ranks[source]
        if self.local is not None:
            receipt = self.local.post(buffer, world_rank)
            return Receipt(buffer, partial(self.local.wait, receipt, world_rank))
        tag = self._expected[source] % _TAG_LIMIT
        self._expected[source] += 1
        try:
            group = self._up if source < self._rank else self._down
            work = dist.irecv(bytes_of(buffer), world_rank, group=group, tag=tag)
        except RuntimeError as error:
            raise _lost("receiving from", world_rank, error) from error
        assert work is not None
        return Receipt(buffer, partial(_wait, work, "receiving from", world_rank))

    def flush(self) -> None:
        """Waits until every tensor has left."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _held, target = self._pending.popleft()
        _wait(work, "sending to", self._ranks[target])


def _wait(work: dist.Work, doing: str, rank: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise _lost(doing, rank, error) from error


def _lost(doing: str, rank: int, error: RuntimeError) -> PeerLostError:
    return lost_peer(f"{doing} rank {rank} failed: {error}", rank=rank)

"""Point-to-point messages between the ranks of a pipeline.

Messages from one rank to another form a channel and keep their order: the n-th receive posted at one end
gets the n-th tensor sent at the other. Receives are posted ahead of need, sends return at once, so
transfers overlap compute.

NCCL runs what two ranks send one another in the order in which it was asked for: a receive posted ahead
would hold up a send to the same rank, and two ranks that both post receives first would wait for ever. With a
process group for each direction, messages up and down the pipeline do not meet.
"""

from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import PeerLostError

__all__ = ["Receipt", "Transport"]

_TAG_LIMIT = 2**30
# Sends whose memory is held at most. Waiting for the oldest cannot deadlock: schedules are proved under
# rendezvous (`schedule.validate`).
_MOST_PENDING = 4


class Receipt:
    """A receive that was posted: `wait` gives the tensor."""

    __slots__ = ("_source", "_tensor", "_work")

    def __init__(self, tensor: Tensor, work: dist.Work | None, source: int):
        self._tensor = tensor
        self._work = work
        self._source = source

    def wait(self) -> Tensor:
        """Blocks until the tensor has arrived.

        Raises:
            PeerLostError: the sender died or did not answer in time.
        """
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _lost("receiving from", self._source, error) from error
            self._work = None
        return self._tensor


class Transport:
    """Sends and receives tensors between the ranks of one pipeline.

    Args:
        ranks: world rank of each pipeline rank.
        rank: the pipeline rank of this process.
        up: process group for messages to higher pipeline ranks; None for the default one.
        down: process group for messages to lower ones.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        rank: int,
        up: dist.ProcessGroup | None = None,
        down: dist.ProcessGroup | None = None,
    ):
        self._ranks = tuple(ranks)
        self._rank = rank
        self._up, self._down = up, down
        self._sent = [0] * len(ranks)
        self._expected = [0] * len(ranks)
        self._pending: deque[tuple[dist.Work, Tensor, int]] = deque()

    def send(self, tensor: Tensor, target: int) -> None:
        """Starts sending a tensor to a pipeline rank; its memory is held until it has left.

        Where several sends are under way, waits until the first of them has left.
        """
        if tensor.numel() == 0:
            return
        payload = tensor.detach().contiguous()
        tag = self._sent[target] % _TAG_LIMIT
        self._sent[target] += 1
        # Gloo tells whether a send has completed only to those that wait for it. The oldest has mostly left.
        while len(self._pending) >= _MOST_PENDING or (self._pending and self._pending[0][0].is_completed()):
            self._finish_oldest()
        try:
            group = self._up if target > self._rank else self._down
            work = dist.isend(_bytes_of(payload), self._ranks[target], group=group, tag=tag)
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
            return Receipt(buffer, None, self._ranks[source])
        tag = self._expected[source] % _TAG_LIMIT
        self._expected[source] += 1
        try:
            group = self._up if source < self._rank else self._down
            work = dist.irecv(_bytes_of(buffer), self._ranks[source], group=group, tag=tag)
        except RuntimeError as error:
            raise _lost("receiving from", self._ranks[source], error) from error
        return Receipt(buffer, work, self._ranks[source])

    def flush(self) -> None:
        """Waits until every tensor has left."""
        while self._pending:
            self._finish_oldest()

    def _finish_oldest(self) -> None:
        work, _held, target = self._pending.popleft()
        try:
            work.wait()
        except RuntimeError as error:
            raise _lost("sending to", self._ranks[target], error) from error


def _lost(doing: str, rank: int, error: RuntimeError) -> PeerLostError:
    return PeerLostError(f"{doing} rank {rank} failed: {error}", rank=rank)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The tensor as bytes where the transport does not know its type."""
    if tensor.dtype in _KNOWN:
        return tensor
    return tensor.view(-1).view(torch.uint8) if tensor.dim() == 0 else tensor.flatten().view(torch.uint8)


_KNOWN = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)

"""Messages of a step: point to point, small collectives, sums of many gradients in few messages.

Messages from one rank to another form a channel and keep their order: the n-th receive posted at one end gets
the n-th tensor sent at the other. Receives are posted ahead of need and sends return at once, so transfers
overlap compute. On CPUs, a pipeline on one host sends through shared memory. A pipeline over several hosts
sends everything through process groups: a rank that waits in one takes nothing from shared memory meanwhile,
where others may first have to get rid of a message.

NCCL runs the messages between two ranks in the order in which they were issued: a receive posted ahead would
hold up a send to the same rank, and two ranks that both post receives first would wait for ever. With one
process group per direction, messages up and down the pipeline do not meet.

They are small, and every rank waits for them. Where all ranks of the group share a host, the messages go
directly through shared memory, without the threads of a process group.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.message_names import Purpose, lost_peer
from shardwright.comm.tensor_codec import bytes_of
from shardwright.errors import PeerLostError
from shardwright.placement import size_of_buckets

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


# Large batches go in pieces: shared memory stays as large as it was once needed, and there is some for each
# other rank.
_PIECE_BYTES = 256 * 1024
_PACKED_BYTES = 64 * 1024  # a copy costs less than a message


class SmallCollectives:
    """Collectives of one group."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        rank: int,
        group: dist.ProcessGroup | None = None,
        local: LocalPeers | None = None,
    ):
        self._ranks = tuple(ranks)
        self._rank = rank
        self._group = group
        self._others = tuple(other for other in ranks if other != rank)
        self._local = local if local is not None and all(other in local for other in self._others) else None

    @property
    def on_one_host(self) -> bool:
        """Whether messages go by connections of the ranks' own."""
        return self._local is not None

    def broadcast(self, tensors: Sequence[Tensor], source: int, purpose: Purpose) -> None:
        """Gives all ranks the tensors of one of them, given by its world rank."""
        parts = [bytes_of(tensor) for tensor in tensors if tensor.numel()]
        if not self._others or not parts:
            return
        if self._local is None or (len(parts) > 1 and sum(map(len, parts)) <= _PACKED_BYTES):
            self._broadcast_as_one(parts, source, purpose)
            return
        pieces = [piece for part in parts for piece in _pieces_of(part)]
        if self._rank == source:
            for piece in pieces:
                for other in self._others:
                    self._local.send(piece, other, purpose)
        else:
            receipts = [self._local.post(piece, source, purpose) for piece in pieces]
            self._local.wait(receipts[-1], source)  # they come in order

    def _broadcast_as_one(self, parts: list[Tensor], source: int, purpose: Purpose) -> None:
        packed = parts[0]
        if len(parts) > 1:
            packed = torch.cat(parts)
        if self._local is None:
            dist.broadcast(packed, source, group=self._group)
        else:
            self.broadcast([packed], source, purpose)
        if packed is parts[0]:
            return
        if self._rank != source:
            for mine, received in zip(
                parts, torch.split(packed, [part.numel() for part in parts]), strict=True
            ):
                mine.copy_(received)

    def gather(self, row: Tensor, purpose: Purpose) -> Tensor:
        """The tensors of all ranks, of one shape (...); the result is (ranks, ...) on each."""
        rows = torch.zeros(len(self._ranks), *row.shape, dtype=row.dtype, device=row.device)
        rows[self._ranks.index(self._rank)] = row
        if self._local is None:
            if self._others:
                dist.all_reduce(rows, group=self._group)  # each rank fills in its own row
            return rows
        for other in self._others:
            self._local.send(row.detach(), other, purpose)
        for other in self._others:
            self._local.wait(self._local.post(rows[self._ranks.index(other)], other, purpose), other)
        return rows


def _pieces_of(part: Tensor) -> list[Tensor]:
    return [part[start : start + _PIECE_BYTES] for start in range(0, part.numel(), _PIECE_BYTES)]


_MOST_BUCKET_BYTES = 25 * 2**20


def sums_over(
    group: dist.ProcessGroup | None,
    tensors: Sequence[Tensor],
    *,
    divisor: int = 1,
    most_bytes: int = _MOST_BUCKET_BYTES,
) -> list[Tensor]:
    """The sums of these tensors over the ranks of a group, in memory of their own; collective."""
    found: list[Tensor | None] = [None] * len(tensors)
    pending = []
    for positions in _buckets(tensors, most_bytes):
        packed = torch.cat([tensors[position].reshape(-1) for position in positions])
        if divisor != 1:
            packed /= divisor
        pending.append((positions, packed, dist.all_reduce(packed, group=group, async_op=True)))
    for positions, packed, work in pending:
        if work is not None:
            work.wait()
        parts = torch.split(packed, [tensors[position].numel() for position in positions])
        for position, part in zip(positions, parts, strict=True):
            found[position] = part.clone().view(tensors[position].shape)
    return [each for each in found if each is not None]


def _buckets(tensors: Sequence[Tensor], most_bytes: int) -> list[list[int]]:
    """Positions of the tensors that go in one message: of one type, up to the size of a bucket."""
    most = size_of_buckets(sum(each.nbytes for each in tensors), most=most_bytes)
    found: list[list[int]] = []
    for dtype in sorted({each.dtype for each in tensors}, key=str):
        room = -1
        for position, tensor in enumerate(tensors):
            if tensor.dtype != dtype:
                continue
            if room < tensor.nbytes:
                found.append([])
                room = most
            found[-1].append(position)
            room -= tensor.nbytes
    return found

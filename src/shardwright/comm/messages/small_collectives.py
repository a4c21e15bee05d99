"""Small collectives of a step beside the pipeline's messages: batch, outputs, figures.

They are small, and every rank waits for them. Where all ranks of the group share a host, the messages go
directly through shared memory, without the threads of a process group.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm.encoding.tensor_bytes import bytes_of
from shardwright.comm.identity.purpose import Purpose
from shardwright.comm.one_host.local_peers import LocalPeers

__all__ = ["SmallCollectives"]


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

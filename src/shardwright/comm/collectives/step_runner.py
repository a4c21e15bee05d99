"""Runs the steps of a collective: copies and sums on this core, messages through a process group."""

import contextlib
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from shardwright.collectives.steps import (
    Arrived,
    Combine,
    Copy,
    Hear,
    Left,
    Memory,
    Receive,
    Send,
    Span,
    Step,
    Tell,
)
from shardwright.comm.absence.peer_loss import lost_peer
from shardwright.comm.collectives.neighbours import Neighbours
from shardwright.comm.collectives.reduction import Reduction

__all__ = ["run_steps"]

_LARGEST_TAG = 2**31 - 1


def run_steps(
    steps: Sequence[Step],
    memories: Mapping[Memory, Tensor],
    *,
    messages: dist.ProcessGroup | None,
    neighbours: Neighbours | None,
    world_ranks: Sequence[int],
    reduction: Reduction,
    what: str,
) -> None:
    """Runs the row of one rank to its end."""
    mail = _Mail(messages, world_ranks, what)

    def at(span: Span) -> Tensor:
        return memories[span.memory][span.start : span.stop]

    for step in steps:
        match step:
            case Copy(source, target):
                data, copied = at(source), at(target)
                if data.data_ptr() != copied.data_ptr():
                    copied.copy_(data)
            case Combine(sources, target):
                reduction.combine([at(source) for source in sources], at(target))
            case Tell():
                assert neighbours is not None
                neighbours.tell()
            case Hear(peer, number):
                assert neighbours is not None
                neighbours.hear(peer, number)
            case Send(peer, span):
                mail.send(peer, at(span))
            case Receive(peer, span):
                mail.receive(peer, at(span))
            case Left(peer, number):
                mail.left(peer, number)
            case Arrived(peer, number):
                mail.arrived(peer, number)
    mail.finish()


class _Mail:
    """Messages of one collective to and from ranks of other nodes."""

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        world_ranks: Sequence[int],
        what: str,
    ):
        self._group = group
        self._world_ranks = world_ranks
        self._what = what
        # What another collective sends is never taken: a message larger than the memory for it would have
        # gloo end the process.
        self._tag = zlib.crc32(what.encode()) & _LARGEST_TAG
        self._sent: dict[int, list[dist.Work]] = defaultdict(list)
        self._num_left: dict[int, int] = defaultdict(int)
        self._expected: dict[int, list[dist.Work]] = defaultdict(list)
        self._num_arrived: dict[int, int] = defaultdict(int)

    def send(self, peer: int, data: Tensor) -> None:
        """Starts to send elements."""
        assert self._group is not None
        with self._naming("sending to", peer):
            self._sent[peer].append(self._group.send([data], peer, self._tag))

    def receive(self, peer: int, target: Tensor) -> None:
        """Says where the next elements of a rank go."""
        assert self._group is not None
        with self._naming("receiving from", peer):
            self._expected[peer].append(self._group.recv([target], peer, self._tag))

    def left(self, peer: int, number: int) -> None:
        """Waits until so many messages to a rank have left."""
        while self._num_left[peer] < number:
            with self._naming("sending to", peer):
                self._sent[peer][self._num_left[peer]].wait()
            self._num_left[peer] += 1

    def arrived(self, peer: int, number: int) -> None:
        """Waits until so many messages from a rank have arrived."""
        while self._num_arrived[peer] < number:
            with self._naming("receiving from", peer):
                self._expected[peer][self._num_arrived[peer]].wait()
            self._num_arrived[peer] += 1

    def finish(self) -> None:
        """Waits until everything has left."""
        for peer, works in self._sent.items():
            self.left(peer, len(works))

    @contextlib.contextmanager
    def _naming(self, doing: str, peer: int) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            lost = self._world_ranks[peer]
            raise lost_peer(f"{self._what}: {doing} rank {lost} failed: {error}", rank=lost) from error

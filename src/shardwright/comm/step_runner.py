"""Runs the steps of a collective: copies and sums on this core, messages through a process group."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

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
from shardwright.comm.neighbours import Neighbours
from shardwright.comm.peer_loss import lost_peer
from shardwright.comm.reduction import Reduction

__all__ = ["run_steps"]


def run_steps(
    steps: Sequence[Step],
    memories: Mapping[Memory, Tensor],
    *,
    messages: dist.ProcessGroup | None,
    neighbours: Neighbours | None,
    reduction: Reduction,
    what: str,
) -> None:
    """Runs the row of one rank to its end.

    Args:
        steps: the row.
        memories: a tensor of one dimension for each memory that it uses, all of one dtype.
        messages: takes messages to other nodes; None where there are none.
        neighbours: the node; None where this rank is alone there.
        reduction: for sums.
        what: the collective, for errors.

    Raises:
        PeerLostError: a rank has ended, or does not answer.
        TraceMismatchError: a rank of the node is in another collective.
    """
    sent: dict[int, list[dist.Work]] = defaultdict(list)
    received: dict[int, list[dist.Work]] = defaultdict(list)
    num_left: dict[int, int] = defaultdict(int)
    num_arrived: dict[int, int] = defaultdict(int)

    def at(span: Span) -> Tensor:
        return memories[span.memory][span.start : span.stop]

    def wait(works: list[dist.Work], done: dict[int, int], peer: int, count: int, doing: str) -> None:
        while done[peer] < count:
            try:
                works[done[peer]].wait()
            except RuntimeError as error:
                raise lost_peer(f"{what}: {doing} rank {peer} failed: {error}", rank=peer) from error
            done[peer] += 1

    for step in steps:
        match step:
            case Copy(source, target):
                source_data, target_data = at(source), at(target)
                if source_data.data_ptr() != target_data.data_ptr():
                    target_data.copy_(source_data)
            case Combine(sources, target):
                reduction.combine([at(source) for source in sources], at(target))
            case Tell():
                assert neighbours is not None
                neighbours.tell()
            case Hear(peer, count):
                assert neighbours is not None
                neighbours.hear(peer, count)
            case Send(peer, span):
                assert messages is not None
                sent[peer].append(_begin(messages.send, at(span), peer, f"{what}: sending to"))
            case Receive(peer, span):
                assert messages is not None
                received[peer].append(_begin(messages.recv, at(span), peer, f"{what}: receiving from"))
            case Left(peer, count):
                wait(sent[peer], num_left, peer, count, "sending to")
            case Arrived(peer, count):
                wait(received[peer], num_arrived, peer, count, "receiving from")
    for peer, works in sent.items():
        wait(works, num_left, peer, len(works), "sending to")


def _begin(start: Callable[..., dist.Work], span: Tensor, peer: int, doing: str) -> dist.Work:
    try:
        return start([span], peer, 0)
    except RuntimeError as error:
        raise lost_peer(f"{doing} rank {peer} failed: {error}", rank=peer) from error

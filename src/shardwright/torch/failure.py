"""Errors of a step, with the rank that failed first."""

from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.comm.peer_loss import lost_peer, names_a_lost_peer
from shardwright.errors import PeerLostError, PeerTimeoutError
from shardwright.torch.context import Context

__all__ = ["first_cause_named"]


@contextmanager
def first_cause_named(context: Context) -> Iterator[None]:
    """Tells the other ranks when this one fails, and finds out who failed first when it loses one.

    Raises:
        PeerLostError: a peer was lost; the message names the rank where it began.
    """
    blame = context.blame
    if blame is None:
        yield
        return
    blame.begin()
    try:
        yield
    except PeerLostError as error:
        blame.confess(error, lost_peer=error.rank)
        if error.rank is None:
            raise
        first = blame.first_cause(error.rank)
        if isinstance(error, PeerTimeoutError) and first.is_silent and first.rank == error.rank:
            raise
        raise type(error)(
            f"rank {first.rank} failed first ({first.text}); rank {context.rank} noticed it: {error}",
            rank=first.rank,
        ) from error
    except RuntimeError as error:
        blame.confess(error)
        if names_a_lost_peer(str(error)):
            raise lost_peer(f"a peer of rank {context.rank} was lost: {error}") from error
        raise
    except BaseException as error:
        blame.confess(error)
        raise

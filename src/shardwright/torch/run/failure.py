"""Reports a step's error, with the rank that failed first."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from shardwright.comm.absence.blame import Blame, Note
from shardwright.comm.absence.peer_loss import lost_peer, names_a_lost_peer
from shardwright.errors import PeerLostError, PeerTimeoutError
from shardwright.torch.run.context import Context

__all__ = ["first_cause_named"]


@contextmanager
def first_cause_named(context: Context) -> Iterator[None]:
    """Tells the other ranks when this one fails; when it loses a peer, finds who failed first."""
    blame = context.watch.blame
    if blame is None:
        yield
        return
    blame.begin()
    try:
        yield
    except PeerLostError as error:
        blame.confess(error, lost_peer=error.rank, is_loss=True)
        if error.rank is None:
            raise _by_notes(error, blame, context) from error
        first = blame.first_cause(error.rank)
        if not blame.store_answers or (first.is_loss and first.lost_peer is None):
            raise _by_notes(error, blame, context) from error
        knows_no_more = first.rank == error.rank and (first.is_silent or first.is_loss)
        if isinstance(error, PeerTimeoutError) and knows_no_more:
            raise
        raise type(error)(
            f"rank {first.rank} failed first ({first.text}); rank {context.rank} noticed it: {error}",
            rank=first.rank,
        ) from error
    except RuntimeError as error:
        is_loss = names_a_lost_peer(str(error))
        blame.confess(error, is_loss=is_loss)
        if is_loss:
            raise _by_notes(error, blame, context) from error
        raise
    except BaseException as error:
        blame.confess(error)
        raise


def _by_notes(error: RuntimeError, blame: Blame, context: Context) -> PeerLostError:
    """The error where nobody knows which rank was lost first: it names those that may be meant."""
    suspects = blame.suspects(context.mesh.world_size)
    rank = suspects[0].rank if len(suspects) == 1 else getattr(error, "rank", None)
    return lost_peer(f"{_told(suspects)}; rank {context.rank} noticed it: {error}", rank=rank)


def _told(suspects: Sequence[Note]) -> str:
    if not suspects:
        host = os.environ.get("MASTER_ADDR", "another host")
        return f"a peer was lost, and the job's store on {host} does not answer: it may be out of reach"
    if not suspects[0].is_silent:
        return "; ".join(f"rank {note.rank} failed first ({note.text})" for note in suspects)
    ranks = ", ".join(str(note.rank) for note in suspects)
    several = len(suspects) > 1
    return (
        f"rank{'s' * several} {ranks} left without a word: killed, out of memory, hanging, out of reach, at "
        f"the end of the script{', or waiting for another of them' * several}"
    )

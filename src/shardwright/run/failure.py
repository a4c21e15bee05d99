"""Reports a step's error, with the rank that failed first, or whose data ran out."""

import os
import socket
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

from shardwright.comm.blame import Blame, Note
from shardwright.comm.message_names import listed, lost_peer, names_a_lost_peer
from shardwright.errors import PeerLostError, PeerTimeoutError, UsageError
from shardwright.run.context import Context

STEP = "the step function"
"""The beginning of every step's `MeetingPlace.where`."""


_NO_PORT = 1
"""On which nobody listens: a host that can be reached refuses at once."""
_ANSWER_S = 3.0


def first_cause_named(context: Context) -> AbstractContextManager[None]:
    """Tells the other ranks when this one fails; when it loses a peer, finds who failed first."""
    blame = context.watch.blame
    return nullcontext() if blame is None else _first_cause_named(context, blame)


@contextmanager
def _first_cause_named(context: Context, blame: Blame) -> Iterator[None]:
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
            if cut_off := _cut_off(context, error.rank):
                raise PeerTimeoutError(f"{cut_off}: {error}", rank=error.rank) from error
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
    silent = next((note.rank for note in suspects if note.is_silent), None if suspects else 0)
    cut_off = "" if silent is None else _cut_off(context, silent)
    return lost_peer(f"{cut_off or _told(suspects)}; rank {context.rank} noticed it: {error}", rank=rank)


def _cut_off(context: Context, rank: int) -> str:
    """Says that the host of a rank cannot be reached; empty where it answers, or is this one."""
    if not (hosts := context.watch.hosts):
        return ""
    here, there = hosts[context.rank], hosts[rank]
    if here == there or not there.address:
        return ""
    try:
        socket.create_connection((there.address, _NO_PORT), timeout=_ANSWER_S).close()
    except ConnectionError:
        return ""  # it has answered
    except OSError as error:
        return (
            f"host {here.name} cannot reach host {there.name} ({there.address}), on which rank {rank} runs "
            f"({error})"
        )
    return ""


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


def out_of_data(context: Context, error: PeerLostError | UsageError) -> PeerLostError | UsageError:
    """The error of a rank that waits in vain, with who ran out of data, where that is why."""
    whereabouts, reporter = context.watch.whereabouts, context.reporter
    if whereabouts is None or reporter is None:
        return error
    done, in_step = reporter.num_steps, isinstance(error, PeerLostError)
    others = [rank for rank in range(context.mesh.world_size) if rank != context.rank]
    try:
        notes = {rank: note for rank in others if (note := whereabouts.of(rank)) and note.steps == done}
    except RuntimeError:  # the store has gone, with the rank that served it
        return error
    blame = context.watch.blame
    failed = {rank for rank in notes if blame is not None and blame.has_failed(rank)}  # and caught its error
    gone = {rank for rank, note in notes.items() if note.ended and not note.failed} - failed
    going_on = {rank for rank, note in notes.items() if note.place and note.place.where.startswith(STEP)}
    (going_on if in_step else gone).add(context.rank)
    if not gone or not going_on:
        return error
    text = (
        f"{_ranks(gone)} ran out of data, or left the loop, after step {done}, and {_ranks(going_on)} began "
        f"step {done + 1}: a step is made by all ranks. Give all ranks as many batches (sw.data_loader "
        "does), or end the loop on all ranks after the batches of the shortest."
    )
    return type(error)(
        f"{text} {error}", **({"rank": error.rank} if isinstance(error, PeerLostError) else {})
    )


def _ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {listed(sorted(ranks))}"

"""Calls that several ranks make together, and the rank that failed first, or whose data ran out."""

import atexit
import errno
import gc
import itertools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

from shardwright.comm.blame import Blame, Note
from shardwright.comm.joining.process_group import default_store, groups_in_doubt
from shardwright.comm.joining.store import limit_silence
from shardwright.comm.meeting_place import Stillness, told_in_a_line
from shardwright.comm.message_names import listed, lost_peer, names_a_lost_peer
from shardwright.comm.pulse import Doing, Pulse, Pulses
from shardwright.comm.roll_call import Call, RollCall
from shardwright.comm.whereabouts import Stalls, Whereabouts
from shardwright.errors import (
    CheckpointError,
    PeerLostError,
    PeerTimeoutError,
    ShardwrightError,
    UsageError,
)
from shardwright.run.context import Context, context, is_initialized
from shardwright.runtime.action_loop import note_actions_on, present_action

STEP = "the step function"
"""The beginning of every step's `MeetingPlace.where`."""


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
        cut_off = _cut_off(context, first.rank) if first.is_silent or first.is_loss else ""
        knows_no_more = first.rank == error.rank and (first.is_silent or first.is_loss) and not cut_off
        if isinstance(error, PeerTimeoutError) and knows_no_more:
            raise
        told = cut_off or f"rank {first.rank} failed first ({first.text})"
        raise type(error)(f"{told}; rank {context.rank} noticed it: {error}", rank=first.rank) from error
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
    if not context.watch.hosts_answer:
        return ""
    here, there = context.watch.hosts[context.rank], context.watch.hosts[rank]
    if here[:2] == there[:2] or not there.address:
        return ""
    try:
        there.refuses(_ANSWER_S)
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH):
            return (
                f"host {here.name} cannot reach host {there.name} ({there.address}), on which rank {rank} "
                f"runs ({error})"
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


_T = TypeVar("_T")
_F = TypeVar("_F")

_RUNS = itertools.count()


def prepare(made: Context) -> None:
    """Gives a run what its ranks find each other with; on all ranks, in the same order."""
    run = next(_RUNS)
    atexit.unregister(_leave_at_once)
    atexit.register(_leave_at_once)
    pulse = made.watch.pulse = made.watch.pulse or Pulse(made.rank)
    note_actions_on(pulse.page)
    if made.mesh.world_size == 1:
        _beat_alone(made, pulse)
        return
    store: Any = default_store()  # whose type, as PyTorch declares it, lacks clone()
    made.watch.whereabouts = whereabouts = Whereabouts(
        store,
        rank=made.rank,
        run=run,
        confess=partial(_confess, made),
        pulse=made.watch.pulse,
        pulses=_pulses(made),
        accuse=_accuse(made),
        stalls=lambda said: Stalls(made.rank, made.config.missing_ranks_s, said, _tell_of_a_stall),
        limit_silence=partial(limit_silence, store, made.config.timeout_s / 2),
    )
    made.watch.roll_call = RollCall(
        store,
        whereabouts,
        rank=made.rank,
        patience_s=made.config.missing_ranks_s,
        timeout_s=made.config.timeout_s,
        local=made.links.local_peers,
        tell=lambda text: warnings.warn(text, stacklevel=2),
    )
    whereabouts.does = present_action
    whereabouts.watch()


def _leave_at_once() -> None:
    """A rank that has lost another one holds up the report, and the restart, by up to a second.

    So long the interpreter's last collections take, which look at all of PyTorch. They close what scripts
    have left open, so other ends keep them.
    """
    if isinstance(getattr(sys, "last_value", None), PeerLostError):
        gc.freeze()


def _beat_alone(made: Context, pulse: Pulse) -> None:
    """The single rank of a run says what it does, too: for whoever looks from outside."""
    script = Stillness(threading.get_ident())

    def doing() -> Doing:
        steps, action, frame = made.reporter.num_steps if made.reporter else 0, present_action(), script.frame
        told = told_in_a_line(frame, steps=steps, in_step=bool(action), action=action)
        return Doing(False, told, script.outline)

    pulse.begin(doing)
    owner = os.getpid()

    def at_exit() -> None:
        if os.getpid() != owner:
            return  # a child of the script
        error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        ended = f"has ended with {type(error).__name__}: {str(error).partition(chr(10))[0][:500]}"
        pulse.rest("has come to the end of its script" if error is None else ended)

    atexit.register(at_exit)
    made.cleanup.callback(atexit.unregister, at_exit)
    made.cleanup.callback(pulse.rest, "has called sw.shutdown()")


def _pulses(made: Context) -> Pulses | None:
    """Over the other ranks of this host."""
    pulse = made.watch.pulse
    pages = {} if pulse is None else pulse.others(host.page for host in made.watch.hosts)
    if made.watch.blame is not None:
        made.watch.blame.has_ended = lambda rank: rank in pages and pages[rank].has_ended()
    return Pulses(made.rank, pages, _tell_of_a_stall) if pages else None


def _accuse(made: Context) -> Callable[[int, str], None]:
    blame = made.watch.blame
    return (lambda rank, why: None) if blame is None else blame.accuse


def _tell_of_a_stall(text: str) -> None:
    sys.stderr.write(f"shardwright: {text}\n")
    sys.stderr.flush()


def _confess(made: Context, error: BaseException) -> None:
    """Says why the script of this rank ends, unless that is another rank's doing."""
    consequence = isinstance(error, PeerLostError) or names_a_lost_peer(str(error))
    if made.watch.blame is not None and not consequence:
        made.watch.blame.confess(error)


def script_ended(error: BaseException | None) -> None:
    """Says that the script of this rank has ended, where the interpreter's end does not."""
    if is_initialized() and (whereabouts := context().watch.whereabouts) is not None:
        whereabouts.script_ended(error)


def meet(where: str, ranks: Sequence[int] | None = None) -> None:
    """Returns when all ranks have come to a call; does nothing where there is one rank."""
    meet_each([Call(where, tuple(range(context().mesh.world_size) if ranks is None else ranks))])


def meet_each(calls: Sequence[Call]) -> None:
    """Returns when all ranks have come to all of these calls; none of them waits for another one."""
    current = context()
    if current.watch.roll_call is None:
        return
    with first_cause_named(current):
        try:
            current.watch.roll_call.meet_each(calls)
        except UsageError as error:
            groups_in_doubt()
            raise out_of_data(current, error) from error
        except BaseException:
            groups_in_doubt()
            raise


def call_together(where: str, ranks: Sequence[int], *, hint: str = "") -> AbstractContextManager[Any]:
    """A context for a call that several ranks make together, and in which they wait for each other anyway."""
    whereabouts = context().watch.whereabouts
    if whereabouts is None or len(ranks) < 2:
        return nullcontext()
    return whereabouts.inside(where, ranks, hint=hint)


def on_every_rank(run: Context, make: Callable[[], _T]) -> _T:
    """Makes something on every rank, or on none if one rank cannot; collective over all ranks."""
    return on_every_rank_told(run, lambda: (make(), None))[0]


def on_every_rank_told(run: Context, make: Callable[[], tuple[_T, _F]]) -> tuple[_T, list[_F]]:
    """The same, where each rank also makes a fact that all are told; returns those of all ranks."""
    made: list[tuple[_T, _F]] = []
    problem: ShardwrightError | None = None
    try:
        made.append(make())
    except ShardwrightError as error:
        problem = error
    except Exception as error:  # of the script's own objects, or no memory for the copies
        problem = CheckpointError(f"rank {run.rank}: {type(error).__name__}: {error}")
    fact: Any = made[0][1] if made else None
    told = run.from_all_ranks((problem, fact))
    first = next((each for each, _ in told if each is not None), None)
    if first is not None:
        raise first
    return made[0][0], [fact for _, fact in told]


def ranks_with_the_model() -> tuple[int, ...]:
    """World ranks that together have all elements of the model once, with this one among them."""
    current = context()
    return current.mesh.group(("pp", "dp_shard", "cp", "ep", "tp"), current.rank)

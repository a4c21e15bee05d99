"""Tracks where a rank is in its script, and ends ranks that wait for each other for ever.

::

    rank 0   train_step, receiving from rank 1      waits
    rank 1   time.sleep at data.py:31               is still: named, with its stack, and all go on waiting

    rank 0   torch.distributed.all_reduce           waits for rank 1
    rank 1   train_step, receiving from rank 0      waits for rank 0: neither will come, so rank 0 ends

A rank that waits looks, from a thread of its own, because its wait may be inside of C++. What the others have
said counts only if they go on saying it: a rank that gets on says nothing.

A rank counts its joint calls with others. Two ranks in their k-th common call must be in the same one: if
not, each waits for the other for ever, however slow they are. ::

    rank 0    step 1   step 2   model.state_dict()    3rd common call
    rank 1    step 1   step 2   step 3                3rd common call: another one, so rank 1 will not come

A rank that makes progress reports nothing. One that has been at one place for some seconds leaves a note at
the store. A thread of its own writes it, because the rank may be inside a call into C++.
"""

import atexit
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from shardwright.comm.joining.run_secret import not_from_a_stranger
from shardwright.comm.meeting_place import (
    MeetingPlace,
    Note,
    Stillness,
    joint_call,
    script_line,
    told_in_a_line,
    waits_for_message,
)
from shardwright.comm.message_names import listed
from shardwright.comm.pulse import Doing, Pulse, Pulses
from shardwright.errors import PeerTimeoutError
from shardwright.exit_codes import HANG

_MOST_RANKS = 64
"""Whose notes one look reads."""
_SOON = 0.8
"""Of the patience: a look comes only now and then, and the name is to be there by then."""
_SHORTEST_S = 3.0
_TIMES_USUAL = 3
"""So many times as long as usual a rank may be still: where steps are short, seconds tell enough."""
_TICK_S = 0.5
"""Until the next note of a rank that waits; one that computes has less time for it."""
_NOTE_EVERY_S = 1.0
_LOOK_S_PER_RANK = 1 / 32
"""That long for each rank which one waits for: the store has to answer the looks of all."""
_FADES = 0.9
"""What a long step leaves of itself with each call that ranks make together."""
_STEPS_KNOWN = 3


@dataclass(slots=True)
class Stalls:
    """What a waiting rank finds out about those that it waits for.

    Attributes:
        longest_s: how long a rank may be still before it is named, at most.
    """

    rank: int
    longest_s: float
    said: Callable[[int], Note | None]
    tell: Callable[[str], None]
    _before: dict[int, Note] = field(default_factory=dict)
    _told: set[tuple[int, str]] = field(default_factory=set)
    _deadlock: str = ""

    def look(self, mine: Note, usual_s: float = math.inf) -> str:
        """Looks at the ranks that this one waits for; returns why this rank is to end; empty if it is not.

        Args:
            usual_s: how long steps, and what comes between them, have taken.
        """
        needed = needed_by(mine)
        patience_s = min(self.longest_s, max(_SHORTEST_S, _TIMES_USUAL * usual_s))
        if self.rank not in needed or not mine.waits or mine.still_s < patience_s / 2:
            self._before.clear()
            self._deadlock = ""
            return ""
        notes = {rank: self.said(rank) for rank in needed[:_MOST_RANKS] if rank != self.rank}
        for rank in {each for note in notes.values() if note is not None for each in needed_by(note)}:
            if rank != self.rank and rank not in notes and len(notes) < _MOST_RANKS:
                notes[rank] = self.said(rank)
        fresh = {rank: note for rank, note in notes.items() if note is not None and self._goes_on(rank, note)}
        self._before = {rank: note for rank, note in notes.items() if note is not None}
        still = {r: n for r, n in fresh.items() if not n.waits and n.still_s >= patience_s / 2}
        if still and mine.still_s >= _SOON * patience_s:
            self._name(still, mine, fresh)
        proven = not still and mine.still_s >= patience_s - _TICK_S  # by when it is confirmed
        return self._confirmed(_proof(self.rank, mine, fresh) if proven else "")

    def _goes_on(self, rank: int, note: Note) -> bool:
        """Whether a rank has said the same before, and says it still."""
        before = self._before.get(rank)
        return before is not None and before.line == note.line and note.seconds > before.seconds

    def _name(self, still: Mapping[int, Note], mine: Note, fresh: Mapping[int, Note]) -> None:
        waiting = sorted([self.rank, *(rank for rank, note in fresh.items() if note.waits)])
        for rank, note in still.items():
            if self.rank != waiting[0] or (rank, note.line) in self._told:  # the others would say the same
                continue
            self._told.add((rank, note.line))
            who = f"rank{'s' * (len(waiting) > 1)} {listed(tuple(waiting))} wait{'s' * (len(waiting) == 1)}"
            where = f" in {mine.place.where}" if mine.place is not None else ""
            self.tell(
                f"rank {rank} has been at {note.line or 'one place'} for {note.still_s:.0f} s; {who} for it"
                f"{where}. Its stack:\n{note.stack}"
            )

    def _confirmed(self, proof: str) -> str:
        """The proof, once it has held at two looks."""
        before, self._deadlock = self._deadlock, proof
        return proof if proof and before else ""


def needed_by(note: Note) -> tuple[int, ...]:
    """The ranks that must come to where a rank is."""
    if note.joint is not None:
        return note.joint.ranks
    return () if note.place is None else note.place.ranks


def pause_s(rank: int, note: Note) -> float:
    """Until a rank's next note and look; who waits for nobody does not look.

    One of the first ranks tells all who keeps them waiting: of many, the others look less often.
    """
    needed = needed_by(note) if note.waits else ()
    number = min(len(needed), _MOST_RANKS) if rank in needed[:_MOST_RANKS] else len(needed)
    return max(_TICK_S if note.waits else _NOTE_EVERY_S, _LOOK_S_PER_RANK * number)


def _proof(rank: int, mine: Note, fresh: Mapping[int, Note]) -> str:
    """Why a collective of this rank can never end: one of its ranks waits elsewhere, and all wait.

    Empty where it may end. A collective that all of its ranks are in may take long.
    """
    if mine.joint is None or any(other != rank and other not in fresh for other in mine.joint.ranks):
        return ""
    others = {other: fresh[other] for other in mine.joint.ranks if other != rank}
    if not all(note.waits for note in others.values()):
        return ""
    elsewhere = {
        other: note
        for other, note in others.items()
        if (note.joint is None or note.joint.group != mine.joint.group)
        and rank in needed_by(note)
        and not _has_been_there(mine, note)
    }
    if not elsewhere:
        return ""
    told = "; ".join(f"rank {other} {note}" for other, note in elsewhere.items())
    return (
        f"rank {rank} waits in torch.distributed.{mine.joint.function} ({mine.line}) for rank "
        f"{listed(tuple(elsewhere))}, which waits for rank {rank}: {told}. All ranks of a group make the "
        "same collectives, in the same order: call it on all of them, or give it a group of those that do."
    )


def _has_been_there(mine: Note, other: Note) -> bool:
    """Whether a rank has done the call that another one is still in: messages may be under way."""
    if other.place is None or not mine.counts_hold:
        return False
    return dict(mine.counts).get(other.place.ranks, 0) >= other.place.number


_STUCK_S = 1.5
_TELLS_STACK_S = 2.0
_LAST_NOTE_S = 2.0


class Store(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def compare_set(self, key: str, expected: str, desired: str) -> bytes: ...

    def delete_key(self, key: str) -> bool: ...

    def clone(self) -> "Store": ...


class Whereabouts:
    """The place of this rank, and the places that the others have reported.

    Attributes:
        steps: training steps that this rank has made.
        also_tell: called with each note: tells what others want to know of a rank that does not get on.
        does: what the rank does in the step that it is in.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        run: int = 0,
        confess: Callable[[BaseException], None] = lambda error: None,
        stalls: Callable[[Callable[[int], Note | None]], Stalls] | None = None,
        limit_silence: Callable[[], None] = lambda: None,
        pulse: Pulse | None = None,
        pulses: Pulses | None = None,
        accuse: Callable[[int, str], None] = lambda rank, why: None,
    ):
        self._store = store
        self._own_store: Store | None = None
        self._rank = rank
        self._run = run
        self._counts: dict[tuple[int, ...], int] = {}
        self._place: MeetingPlace | None = None
        self._moves = 0
        self._moved_s = time.monotonic()
        self._usual_s = 0.0
        self.steps = 0
        self.also_tell: list[Callable[[], None]] = []
        self._thread_id = threading.get_ident()
        self._stillness = Stillness(self._thread_id)
        self._stalls = None if stalls is None else stalls(self._said_to_thread)
        self._process_id = os.getpid()
        self._confess = confess
        self._limit_silence = limit_silence
        self._pulse = pulse
        self._pulses = pulses
        self._accuse = accuse
        self.does: Callable[[], str] = str
        self._ended = ""
        self._failed = False
        self._counts_hold = True
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- of this rank ----

    def begin(
        self, where: str, ranks: Sequence[int], *, name: str = "", meeting: int = 0, hint: str = ""
    ) -> MeetingPlace:
        """Counts a call that others make, too."""
        scope = tuple(ranks)
        self._counts[scope] = number = self._counts.get(scope, 0) + 1
        return MeetingPlace(where, scope, number, name, meeting, hint)

    @contextmanager
    def at(self, place: MeetingPlace) -> Iterator[MeetingPlace]:
        """Says that this rank is in a call that has begun."""
        before, self._place = self._place, place
        self._move()
        try:
            yield place
        except BaseException:
            self._counts_hold = False
            raise
        finally:
            self._place = before
            self._move()

    def inside(
        self, where: str, ranks: Sequence[int], *, hint: str = ""
    ) -> AbstractContextManager[MeetingPlace]:
        """Counts a call that others make, too, and says that this rank is in it; see `begin`."""
        return self.at(self.begin(where, ranks, hint=hint))

    def _move(self) -> None:
        now_s = time.monotonic()
        self._moves += 1
        if self.steps > 1:  # the first step, which traces and plans, says nothing of others
            self._usual_s = max(now_s - self._moved_s, _FADES * self._usual_s)
        self._moved_s = now_s

    def note(self) -> Note:
        """The present whereabouts of this rank."""
        while True:
            moves = self._moves
            note = self._note()
            if moves == self._moves:  # else the script got on meanwhile, and half of the note is of before
                return note

    def _note(self) -> Note:
        frame = sys._current_frames().get(self._thread_id)
        place, waits, still_s = self._place, self._stillness.waits, self._stillness.seconds
        place_is_told = not waits and still_s >= _TELLS_STACK_S
        return Note(
            place=place,
            # A copy, which is made at a stroke: the script may count a call of other ranks just now.
            counts=tuple(self._counts.copy().items()),
            seconds=time.monotonic() - self._moved_s,
            line="" if frame is None else script_line(frame),
            joint=joint_call(frame) if frame is not None and place is None else None,
            ended=self._ended,
            failed=self._failed,
            counts_hold=self._counts_hold,
            steps=self.steps,
            waits=waits,
            still_s=still_s,
            stack=self._stillness.stack if place_is_told else "",
        )

    def publish(self) -> None:
        """Tells the others now."""
        self._store.set(self._key(self._rank), self.note().to_text())

    # ---- of others ----

    def of(self, rank: int) -> Note | None:
        """The last note of another rank; None if it has written none."""
        key = self._key(rank)
        if not self._store.check([key]):
            return None
        with not_from_a_stranger(f"where rank {rank} is"):
            return Note.from_text(self._store.get(key))

    @property
    def prefix(self) -> str:
        """Of keys at the store that belong to this run."""
        return f"shardwright/whereabouts/{self._run}"

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"

    # ---- the thread ----

    def watch(self) -> None:
        """Begins to leave notes while this rank does not get on; ends with the process, or by `close`.

        Its client of the store is made now: when it is needed, the store may be out of reach.
        """
        self._store_of_thread()
        if self._pulse is not None:
            self._pulse.begin(self._doing, self._look_at_others)
        self._thread = threading.Thread(target=self._watch, name="shardwright-whereabouts", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def close(self, why: str) -> None:
        """Says that this rank makes no more calls."""
        if self._thread is None or os.getpid() != self._process_id:
            return
        atexit.unregister(self._at_exit)
        self._ended = self._ended or why
        self._closed.set()
        self._thread.join(_LAST_NOTE_S)
        self._thread = None
        if self._pulse is not None:
            self._pulse.rest(self._ended)

    def script_ended(self, error: BaseException | None = None) -> None:
        """Says that the script has ended, with an error or without."""
        if error is None:
            self.close("has come to the end of its script")
            return
        if self._thread is not None and os.getpid() == self._process_id:
            self._confess(error)
        self._failed = True
        if self._pulse is not None:
            self._pulse.keep_of_failure({} if self._pulses is None else self._pulses.pages)
        first_line = str(error).partition("\n")[0][:500]
        self.close(f"has ended with {type(error).__name__}: {first_line}")

    def _at_exit(self) -> None:
        self.script_ended(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    def _watch(self) -> None:
        seen, next_s, answers = -1, 0.0, True
        while not self._closed.wait(_TICK_S):
            self._stillness.look()
            now_s = time.monotonic()
            if self._moves != seen:
                seen, next_s = self._moves, now_s + _STUCK_S
            elif answers and now_s >= next_s:
                self._limit_silence()
                note = self.note()
                if not (answers := self._leave(note, self._store_of_thread())):
                    continue
                usual_s = self._usual_s if self.steps >= _STEPS_KNOWN else math.inf
                if self._stalls is not None and (why := self._stalls.look(note, usual_s)):
                    self._end(why)
                next_s = now_s + pause_s(self._rank, note)
        if answers:
            self._leave(self.note(), self._own_store or self._store)

    def _doing(self) -> Doing:
        """For the pulse."""
        frame, place, waits = self._stillness.frame, self._place, self._stillness.waits
        does = told_in_a_line(frame, steps=self.steps, in_step=place is not None, action=self.does())
        waits_for = waits_for_message(frame) if waits else ()
        if waits and not waits_for and frame is not None:
            joint = joint_call(frame) if place is None else None
            ranks = joint.ranks if joint is not None else () if place is None else place.ranks
            waits_for = tuple(rank for rank in ranks if rank != self._rank)
        return Doing(waits, does, self._stillness.outline, waits_for)

    def _look_at_others(self, waits: bool) -> None:
        """Ends the run for a rank of this host that will never go on."""
        if self._pulses is None or (found := self._pulses.look(waits=waits)) is None:
            return
        rank, why = found
        if self._pulses.pages[rank].state() == "T":
            self._pulses.pages[rank].end()
            self._accuse(rank, why)
            self._end(why)

    def _said_to_thread(self, rank: int) -> Note | None:
        """The last note of another rank, as the thread reads it; None where it has written none."""
        store, key = self._store_of_thread(), self._key(rank)
        try:
            if not store.check([key]):
                return None
            with not_from_a_stranger(f"where rank {rank} is"):
                return Note.from_text(store.get(key))
        except RuntimeError:  # the store has gone with the rank that served it
            return None

    def _end(self, why: str) -> None:
        """Ends this process, which waits in C++ for what will never come, with the stack of its script."""
        self._confess(RuntimeError(why))
        name = f"{PeerTimeoutError.__module__}.{PeerTimeoutError.__name__}"
        sys.stdout.flush()
        sys.stderr.write(f"Traceback (most recent call last):\n{self._stillness.stack}\n{name}: {why}\n")
        sys.stderr.flush()
        if self._pulse is not None:
            self._pulse.keep_of_failure({} if self._pulses is None else self._pulses.pages)
        os._exit(HANG)

    def _leave(self, note: Note, store: Store) -> bool:
        """Leaves a note; false where the store does not take it: it goes with the process that serves it."""
        text = note.to_text()
        try:
            store.set(self._key(self._rank), text)
            for tell in self.also_tell:
                tell()
        except RuntimeError:
            return False
        return True

    def _store_of_thread(self) -> Store:
        """A client of the thread's own: the script's is taken while it waits there, as in `new_group`."""
        if self._own_store is None:
            try:
                self._own_store = self._store.clone()
            except RuntimeError:  # stores that are written in Python need not have it
                self._own_store = self._store
        return self._own_store

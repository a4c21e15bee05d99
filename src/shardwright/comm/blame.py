"""Finds the rank that failed first.

A failing rank leaves a note at the store before it ends; one that loses a peer names it. A rank that loses a
peer follows these notes to the first cause: a rank with an error of its own, or one without a note because it
was killed. Gloo's error may not name the lost rank: then all notes are read. ::

    rank 3: lost rank 2 ──► rank 2: lost rank 1 ──► rank 1: no note ──► "rank 1 left without a word"
                                                    rank 1: error    ──► "rank 1 failed: ValueError: ..."
"""

import json
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from shardwright.comm.joining.run_secret import ForgedError, not_from_a_stranger
from shardwright.comm.whereabouts import Store

_T = TypeVar("_T")

_PATIENCE_S = 1.0
_LONGEST_ANSWER_S = 2.0
_PAUSE_S = 0.05
_NO_WORD = "it left without a word: killed, out of memory, hanging, out of reach, or at the end of its script"


@dataclass(frozen=True, slots=True)
class Note:
    """A rank's note before it ends.

    Attributes:
        lost_peer: the rank that it lost; None for an error of its own, or where it does not know.
    """

    rank: int
    lost_peer: int | None
    text: str
    is_loss: bool = False
    is_final: bool = False

    @property
    def is_silent(self) -> bool:
        """Whether the rank said nothing: this note stands for it."""
        return self.text == _NO_WORD


class Blame:
    """Notes of failing ranks at a store.

    A store beyond a dead link never answers, nor says that it does not: it is asked in a thread of its own,
    and no more once it has not answered.

    Attributes:
        has_ended: whether the process of a rank is known to have ended: then it has said all that it will.
    """

    def __init__(self, store: Store, *, rank: int):
        self._store = store
        self._rank = rank
        self._has_note = True  # perhaps, of an earlier run
        self._is_final = False
        self.store_answers = True
        self.has_ended: Callable[[int], bool] = lambda rank: False

    def begin(self) -> None:
        """Begins a step: takes back a note of an earlier one, which the script has got over."""
        if self._has_note and not self._is_final:
            self._ask(lambda: self._store.delete_key(_key(self._rank)))
            self._has_note = False

    def stop(self) -> None:
        """Marks the next note as final: this rank takes no further step, even if its script goes on."""
        self._has_note = False
        self._is_final = True

    def confess(self, error: BaseException, *, lost_peer: int | None = None, is_loss: bool = False) -> None:
        """Says that this rank fails, and why; does nothing if the store cannot be reached."""
        if self._is_final and self._has_note:
            return  # later errors are consequences
        text = f"{type(error).__name__}: {error}"[:2000]
        note = {
            "lost_peer": lost_peer,
            "text": text,
            "is_loss": is_loss or lost_peer is not None,
            "is_final": self._is_final,
        }
        self._has_note = True
        self._ask(lambda: self._store.set(_key(self._rank), json.dumps(note)))

    def accuse(self, rank: int, why: str) -> None:
        """Says for another rank, which cannot say it, why it fails."""
        note = {"lost_peer": None, "text": why[:2000], "is_loss": False, "is_final": True}
        self._ask(lambda: self._store.set(_key(rank), json.dumps(note)))

    def has_failed(self, rank: int) -> bool:
        """Whether a rank has said that it fails."""
        return bool(self._ask(lambda: self._store.check([_key(rank)])))

    def has_stopped(self, rank: int) -> bool:
        """Whether a rank has failed and takes no further step; False where the store does not tell."""
        note = self._note_of(rank, gives_up=False)
        return note is not None and note.is_final

    def first_cause(self, lost_peer: int, *, patience_s: float = _PATIENCE_S) -> Note:
        """The rank where it began, as far as the notes tell."""
        current, seen = lost_peer, {self._rank}
        while True:
            note = self._read(current, patience_s)
            if note is None or note.lost_peer is None or note.lost_peer in seen:
                return note or Note(
                    current,
                    None,
                    _NO_WORD,
                )
            seen.add(current)
            current = note.lost_peer

    def suspects(self, num_ranks: int, *, patience_s: float = _PATIENCE_S) -> list[Note]:
        """The ranks that may have failed first, if this rank does not know which one it lost."""
        others = [rank for rank in range(num_ranks) if rank != self._rank]
        deadline = time.monotonic() + patience_s
        while True:
            ended = [rank for rank in others if self.has_ended(rank)]  # before their last words are read
            notes = {rank: self._note_of(rank) for rank in others}
            if not self.store_answers:
                return []
            failed = [note for note in notes.values() if note is not None and not note.is_loss]
            silent = [Note(rank, None, _NO_WORD) for rank, note in notes.items() if note is None]
            gone = [note for note in silent if note.rank in ended]
            if failed or gone or not silent or time.monotonic() >= deadline:
                return failed or gone or silent
            time.sleep(_PAUSE_S)

    def _read(self, rank: int, patience_s: float) -> Note | None:
        deadline = time.monotonic() + patience_s
        while True:
            has_ended = self.has_ended(rank)  # before its last words are read
            note = self._note_of(rank)
            if note is not None or has_ended or not self.store_answers or time.monotonic() >= deadline:
                return note
            time.sleep(_PAUSE_S)

    def _note_of(self, rank: int, *, gives_up: bool = True) -> Note | None:
        if not self._ask(lambda: self._store.check([_key(rank)]), gives_up=gives_up):
            return None
        text = self._ask(lambda: self._store.get(_key(rank)), gives_up=gives_up)
        if text is None:
            return None
        try:
            with not_from_a_stranger("why a rank fails"):
                found = json.loads(text)
                return Note(
                    rank,
                    found["lost_peer"],
                    str(found["text"]),
                    is_loss=found["is_loss"] is True,
                    is_final=found["is_final"] is True,
                )
        except ForgedError:
            return None  # as if it had said nothing

    def _ask(self, question: Callable[[], _T], *, gives_up: bool = True) -> _T | None:
        """The store's answer; None where it has gone with the rank that served it, or cannot be reached."""
        answers: queue.SimpleQueue[_T | None] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(question())
            except ForgedError:
                answers.put(None)
            except RuntimeError:
                self.store_answers = False
                answers.put(None)

        if not self.store_answers:
            return None
        threading.Thread(target=ask, name="shardwright-blame", daemon=True).start()
        try:
            return answers.get(timeout=_LONGEST_ANSWER_S)
        except queue.Empty:
            self.store_answers = self.store_answers and not gives_up
            return None


def _key(rank: int) -> str:
    return f"shardwright/failed/{rank}"

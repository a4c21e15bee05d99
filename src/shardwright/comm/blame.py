"""Finds out which rank failed first.

A rank that fails says so at the store before it ends; one that loses a peer says which. Whoever loses a
peer follows these notes to the first cause: a rank with an error of its own, or one that says nothing
because it was killed::

    rank 3: lost rank 2 ──► rank 2: lost rank 1 ──► rank 1: no note ──► "rank 1 ended without a word"
                                                    rank 1: error    ──► "rank 1 failed: ValueError: ..."
"""

import contextlib
import json
import time
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Blame", "Note"]

_PATIENCE_S = 1.0
_PAUSE_S = 0.05
_NO_WORD = "it ended without a word: killed, out of memory, hanging, or at the end of its script"


class Store(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Note:
    """What a rank says before it ends.

    Attributes:
        rank: who.
        lost_peer: the rank that it lost; None for an error of its own.
        text: the error.
    """

    rank: int
    lost_peer: int | None
    text: str

    @property
    def is_silent(self) -> bool:
        """Whether the rank said nothing: this note stands for it."""
        return self.text == _NO_WORD


class Blame:
    """Notes of failing ranks at a store.

    Args:
        store: shared by all ranks.
        rank: this rank.
    """

    def __init__(self, store: Store, *, rank: int):
        self._store = store
        self._rank = rank
        self._has_note = True  # perhaps, of an earlier run

    def begin(self) -> None:
        """Begins a step: takes back a note of an earlier one, which the script has got over."""
        if self._has_note:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(_key(self._rank))
            self._has_note = False

    def confess(self, error: BaseException, *, lost_peer: int | None = None) -> None:
        """Says that this rank fails, and why; does nothing if the store cannot be reached."""
        note = {"lost_peer": lost_peer, "text": f"{type(error).__name__}: {error}"[:2000]}
        self._has_note = True
        with contextlib.suppress(RuntimeError):
            self._store.set(_key(self._rank), json.dumps(note))

    def first_cause(self, lost_peer: int, *, patience_s: float = _PATIENCE_S) -> Note:
        """The rank where it began, as far as the notes tell.

        Args:
            lost_peer: the rank that this one lost.
            patience_s: how long to wait for the note of a rank.
        """
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

    def _read(self, rank: int, patience_s: float) -> Note | None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if self._store.check([_key(rank)]):
                    content: dict[str, Any] = json.loads(self._store.get(_key(rank)))
                    return Note(rank, content["lost_peer"], content["text"])
            except RuntimeError:
                return None  # the store went with the rank that served it
            if time.monotonic() >= deadline:
                return None
            time.sleep(_PAUSE_S)


def _key(rank: int) -> str:
    return f"shardwright/failed/{rank}"

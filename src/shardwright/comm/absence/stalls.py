"""Names the rank that others wait for, where it is, and ends ranks that wait for each other for ever.

::

    rank 0   train_step, receiving from rank 1      waits
    rank 1   time.sleep at data.py:31               is still: named, with its stack, and all go on waiting

    rank 0   torch.distributed.all_reduce           waits for rank 1
    rank 1   train_step, receiving from rank 0      waits for rank 0: neither will come, so rank 0 ends

A rank that waits looks, from a thread of its own, because its wait may be inside of C++. What the others have
said counts only if they go on saying it: a rank that gets on says nothing.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from shardwright.comm.absence.meeting_place import Note
from shardwright.comm.identity.rank_set import listed

__all__ = ["Stalls"]

_MOST_RANKS = 64
"""Whose notes one look reads."""
_SOON = 0.8
"""Of the patience: a look comes each two seconds, and the name is to be there by then."""


@dataclass(slots=True)
class Stalls:
    """What a waiting rank finds out about those that it waits for.

    Attributes:
        patience_s: how long a rank may be still before it is named.
        said: the last note of another rank.
        tell: gets a text for people.
    """

    rank: int
    patience_s: float
    said: Callable[[int], Note | None]
    tell: Callable[[str], None]
    _before: dict[int, Note] = field(default_factory=dict)
    _told: set[tuple[int, str]] = field(default_factory=set)
    _deadlock: str = ""

    def look(self, mine: Note) -> str:
        """Looks at the ranks that this one waits for; returns why this rank is to end; empty if it is not."""
        needed = _needed(mine)
        if self.rank not in needed or not mine.waits or mine.still_s < self.patience_s / 2:
            self._before.clear()
            self._deadlock = ""
            return ""
        notes = {rank: self.said(rank) for rank in needed[:_MOST_RANKS] if rank != self.rank}
        for rank in {each for note in notes.values() if note is not None for each in _needed(note)}:
            if rank != self.rank and rank not in notes and len(notes) < _MOST_RANKS:
                notes[rank] = self.said(rank)
        fresh = {rank: note for rank, note in notes.items() if note is not None and self._goes_on(rank, note)}
        self._before = {rank: note for rank, note in notes.items() if note is not None}
        still = {r: n for r, n in fresh.items() if not n.waits and n.still_s >= self.patience_s / 2}
        if still and mine.still_s >= _SOON * self.patience_s:
            self._name(still, mine, fresh)
        proven = not still and mine.still_s >= self.patience_s
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


def _needed(note: Note) -> tuple[int, ...]:
    """The ranks that must come to where a rank is."""
    if note.joint is not None:
        return note.joint.ranks
    return () if note.place is None else note.place.ranks


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
        if (note.joint is None or note.joint.group != mine.joint.group) and rank in _needed(note)
    }
    if not elsewhere:
        return ""
    told = "; ".join(f"rank {other} {note}" for other, note in elsewhere.items())
    return (
        f"rank {rank} waits in torch.distributed.{mine.joint.function} ({mine.line}) for rank "
        f"{listed(tuple(elsewhere))}, which waits for rank {rank}: {told}. All ranks of a group make the "
        "same collectives, in the same order: call it on all of them, or give it a group of those that do."
    )

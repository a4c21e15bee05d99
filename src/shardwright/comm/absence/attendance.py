"""Records at the store which ranks have come to a joint call.

::

    key/block/0    a bit for each of the first 60 ranks that has come; the next ones have another block
    key/full       how many blocks have all their ranks
    key/decision   the call goes on, or why it cannot: the same for all of its ranks
    key/turn       who has looked last for ranks that are missing, and how often

The rank that completes the last block decides that the call goes on. A rank that finds out that another will
not come decides that it does not. The first decision holds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass

from shardwright.comm.absence.meeting_place import MeetingPlace
from shardwright.comm.absence.whereabouts import Store
from shardwright.comm.trust.seal import not_from_a_stranger
from shardwright.errors import PeerLostError, PeerTimeoutError, UsageError

__all__ = ["Attendance", "Decision"]

_RANKS_A_BLOCK = 60  # a store's numbers have 63 bits

_LOSSES: dict[str, Callable[..., PeerLostError]] = {
    "PeerLostError": PeerLostError,
    "PeerTimeoutError": PeerTimeoutError,
}


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome of a call.

    Attributes:
        error: why it cannot go on; None where it goes on.
    """

    error: UsageError | PeerLostError | None = None

    def to_text(self) -> str:
        """The form in the store."""
        if self.error is None:
            return json.dumps({})
        return json.dumps(
            {
                "kind": type(self.error).__name__,
                "text": str(self.error),
                "rank": getattr(self.error, "rank", None),
            }
        )

    @classmethod
    def from_text(cls, text: bytes) -> "Decision":
        """Reads it."""
        with not_from_a_stranger("what becomes of a call"):
            found = json.loads(text)
            if not found:
                return cls()
            make = _LOSSES.get(found["kind"])
            return cls(UsageError(found["text"]) if make is None else make(found["text"], rank=found["rank"]))


class Attendance:
    """Tracks which ranks have come to one call."""

    def __init__(self, store: Store, prefix: str, place: MeetingPlace, rank: int):
        self._store = store
        self._key = f"{prefix}/met/{place.key}"
        self._rank = rank
        self._index = place.ranks.index(rank)
        self._blocks = [
            place.ranks[first : first + _RANKS_A_BLOCK]
            for first in range(0, len(place.ranks), _RANKS_A_BLOCK)
        ]
        self._turns = 0
        self._last_turn = ""

    def come(self) -> bool:
        """Says that this rank has come; returns whether it may be the first."""
        block, bit = divmod(self._index, _RANKS_A_BLOCK)
        present = self._store.add(f"{self._key}/block/{block}", 1 << bit)
        if present == (1 << len(self._blocks[block])) - 1:
            several = len(self._blocks) > 1
            if not several or self._store.add(f"{self._key}/full", 1) == len(self._blocks):
                self.decide(Decision())
        return present == 1 << bit

    def absent(self) -> list[int]:
        """The ranks that have not come."""
        found = []
        for number, ranks in enumerate(self._blocks):
            present = self._store.add(f"{self._key}/block/{number}", 0)
            found += [rank for bit, rank in enumerate(ranks) if not present >> bit & 1]
        return found

    def decision(self) -> Decision | None:
        """The decision on the call, once that is known."""
        key = f"{self._key}/decision"
        return Decision.from_text(self._store.get(key)) if self._store.check([key]) else None

    def decide(self, decision: Decision) -> Decision:
        """Decides the outcome of the call; returns the valid one, since another rank may have been first."""
        return Decision.from_text(self._store.compare_set(f"{self._key}/decision", "", decision.to_text()))

    def takes_turn(self) -> bool:
        """Whether this rank looks now for missing ranks: no other one has since it asked the last time."""
        self._turns += 1
        mine = f"{self._rank}/{self._turns}"
        self._last_turn = self._store.compare_set(f"{self._key}/turn", self._last_turn, mine).decode()
        return self._last_turn == mine

    def forget(self) -> None:
        """Removes what this rank has to remove of it, once no rank needs it any more."""
        block, bit = divmod(self._index, _RANKS_A_BLOCK)
        names = [f"block/{block}"] if bit == 0 else []
        if self._index == 0:
            names += ["full", "decision", "turn"]
        for name in names:
            self._store.delete_key(f"{self._key}/{name}")

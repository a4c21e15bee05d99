"""The missing ranks of a joint call: who came, who did not, and whether they are coming.

::

    key/block/0    a bit for each of the first 60 ranks that has come; the next ones have another block
    key/full       how many blocks have all their ranks
    key/decision   the call goes on, or why it cannot: the same for all of its ranks
    key/turn       who has looked last for ranks that are missing, and how often

The rank that completes the last block decides that the call goes on. A rank that finds out that another will
not come decides that it does not. The first decision holds.

The ranks that have come look for a proof that another is not coming::

    it is in another call that needs one of these, and has made as many calls together with that one
    it waits in a collective of torch.distributed that needs this rank, and that this rank has not begun
    it has come to the end of its script, has called sw.shutdown(), or has ended

With a proof they fail. Without one they warn after some seconds, and name the ranks and their places.

The count of begun collectives shows that a collective has not begun here. Gloo's count includes sends and
receives. So with gloo it must be the very next collective, and the rank must have waited in it for the time
after which a warning comes.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from shardwright.comm.joining.run_secret import not_from_a_stranger
from shardwright.comm.meeting_place import MeetingPlace, Note, collectives_made
from shardwright.comm.message_names import listed
from shardwright.comm.whereabouts import Store, Whereabouts
from shardwright.errors import PeerLostError, PeerTimeoutError, UsageError

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


_FIRST_LOOK_S = 0.25
_FIRST_LOOK_S_PER_RANK = 0.0005
_LONGEST_LOOK_S = 1.0
# Where all that wait read what each missing rank has said: with more ranks, less often.
_LOOK_S_PER_RANK = 0.02
# Where one looks for all: that long one look in so much time, and after so much time another one takes over.
_SHARE = 20
_TAKE_OVER_S = 5.0
_SURELY_WAITS_S = 1.5
_MOST_PLACES = 8
_MOST_WITNESSES = 4


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms in which errors speak of a call.

    Attributes:
        remedy: what to do where they will not.
    """

    needs: str
    remedy: str


class MissingRanks:
    """The ranks that one call waits for."""

    def __init__(
        self,
        place: MeetingPlace,
        terms: Terms,
        whereabouts: Whereabouts,
        *,
        rank: int,
        patience_s: float,
        tell: Callable[[str], None],
        absent: Callable[[], Sequence[int]],
        takes_turn: Callable[[], bool] | None = None,
        is_first: bool = True,
    ):
        self._place = place
        self._terms = terms
        self._whereabouts = whereabouts
        self._rank = rank
        self._patience_s = patience_s
        self._tell = tell
        self._absent = absent
        self._takes_turn = takes_turn
        self._begin_s = time.monotonic()
        num_ranks = len(place.ranks)
        self._pause_s = _FIRST_LOOK_S + _FIRST_LOOK_S_PER_RANK * num_ranks
        self._next_s = self._begin_s + (self._pause_s if is_first else _TAKE_OVER_S)
        self._longest_s = _LONGEST_LOOK_S
        if takes_turn is None:
            self._longest_s = max(_LONGEST_LOOK_S, _LOOK_S_PER_RANK * num_ranks)
        self._has_proof = self._has_told = False
        self._joint: dict[int, Note] = {}

    def look(self) -> float:
        """Looks what the missing ranks have said, if it is time for that."""
        now_s = time.monotonic()
        if now_s >= self._next_s:
            with suppress(RuntimeError):  # the store has gone: then the others cannot look, either
                self._whereabouts.publish()
            if self._takes_turn is None or self._takes_turn():
                self._look(now_s - self._begin_s)
                self._next_s = time.monotonic() + self._next_pause_s(time.monotonic() - now_s)
            else:
                self._next_s = time.monotonic() + _TAKE_OVER_S
        return max(self._next_s - time.monotonic(), 0.0)

    def _next_pause_s(self, took_s: float) -> float:
        if self._has_proof:
            return _FIRST_LOOK_S
        self._pause_s = min(2 * self._pause_s, self._longest_s)
        if self._takes_turn is None:
            return self._pause_s
        return max(self._pause_s, min(_SHARE * took_s, _TAKE_OVER_S / 2))  # so that this rank keeps the turn

    def too_late(self, timeout_s: float) -> PeerTimeoutError:
        """The error when the timeout has come."""
        missing = self._missing()
        return PeerTimeoutError(
            f"{self._terms.needs}: {_named(missing)} not come within {timeout_s:g} s: {_places(missing)}. It "
            "hangs, or is at another place of the script; its log may tell. If it may take longer, raise the "
            "setting timeout_s.",
            rank=next(iter(missing), None),
        )

    def lost(self, error: PeerLostError) -> UsageError | PeerLostError:
        """The error where a rank was lost: it may have said before why it ends."""
        note = None if error.rank is None else self._said(error.rank)
        if error.rank is not None and note is not None and note.ended:
            return self._hopeless({error.rank: note}, {error.rank: note}, time.monotonic() - self._begin_s)
        return type(error)(f"{self._terms.needs}: {error}", rank=error.rank)

    def _look(self, waited_s: float) -> None:
        missing = self._missing()
        if not missing:
            return
        proofs = {r: n for r, n in missing.items() if n is not None and self._will_not_come(r, n)}
        if proofs and not self._has_proof:  # look once more: whoever comes just now is not to be named
            self._has_proof = True
            return
        if proofs:
            raise self._hopeless(missing, proofs, waited_s)
        if waited_s >= self._patience_s and not self._has_told:
            self._has_told = True
            arrived = set(self._place.ranks) - set(missing)
            if self._takes_turn is not None or self._rank == min(arrived):
                self._tell(
                    f"{self._terms.needs}. {_named(missing)} not come after {waited_s:.0f} s: "
                    f"{_places(missing)}. The others wait.{_hints(missing)}"
                )

    def _hopeless(
        self, missing: Mapping[int, Note | None], proofs: Mapping[int, Note], waited_s: float
    ) -> UsageError | PeerLostError:
        text = (
            f"{self._terms.needs}. {_named(missing)} not come after {waited_s:.0f} s, and will not: "
            f"{_places(proofs)}."
        )
        failed = next((rank for rank, note in proofs.items() if note.failed), None)
        if failed is not None:
            return PeerLostError(text, rank=failed)
        return UsageError(f"{text} {self._terms.remedy}{_hints(proofs)}")

    def _missing(self) -> dict[int, Note | None]:
        """Ranks that have not come, with what they have said last."""
        return {rank: self._said(rank) for rank in self._absent()}

    def _said(self, rank: int) -> Note | None:
        """The last note of a rank; None also if the store has gone, with the rank that served it."""
        try:
            return self._whereabouts.of(rank)
        except RuntimeError:
            return None

    def _will_not_come(self, rank: int, note: Note) -> bool:
        if note.ended:
            return True
        if note.place is not None:
            return note.counts_hold and any(
                witness.counts_hold and note.common_calls(other) >= witness.common_calls(rank)
                for other, witness in self._witnesses(note.place)
            )
        if note.joint is None or self._rank not in note.joint.ranks:
            return False
        # This rank may have begun the collective as well, and wait for it later: then others are late for it.
        own = collectives_made(note.joint.group, note.joint.ranks)
        if own is None or note.joint.number is None or note.joint.number <= own:
            return False
        surely_s = _SURELY_WAITS_S
        if note.joint.counts_messages:
            if note.joint.number != own + 1:
                return False
            surely_s = max(surely_s, self._patience_s)
        # It may be done on this rank and not yet on another one: it must have been there for long.
        first = self._joint.setdefault(rank, note)
        if (first.joint, first.line) != (note.joint, note.line) or note.seconds < first.seconds:
            self._joint[rank] = first = note
        return note.seconds - first.seconds >= surely_s

    def _witnesses(self, elsewhere: MeetingPlace) -> list[tuple[int, Note]]:
        """Ranks that wait here and are needed elsewhere: both calls are the last of those that they make with
        whoever is there. An older note tells nothing of now.
        """
        if self._rank in elsewhere.ranks:
            return [(self._rank, self._whereabouts.note())]
        absent = set(self._absent())
        here = [rank for rank in elsewhere.ranks if rank in self._place.ranks and rank not in absent]
        notes = ((rank, self._said(rank)) for rank in here[:_MOST_WITNESSES])
        return [
            (rank, note)
            for rank, note in notes
            if note is not None and note.place is not None and note.place.key == self._place.key
        ]


def _named(ranks: Mapping[int, Note | None]) -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {listed(tuple(ranks))} {'have' if len(ranks) > 1 else 'has'}"


def _places(notes: Mapping[int, Note | None]) -> str:
    told = [
        f"rank {rank} {'has said nothing of its place' if note is None else note}"
        for rank, note in list(notes.items())[:_MOST_PLACES]
    ]
    return "; ".join(told) + (f"; and {len(notes) - _MOST_PLACES} more" if len(notes) > _MOST_PLACES else "")


def _hints(notes: Mapping[int, Note | None]) -> str:
    """The advice for the places of the ranks that do not come."""
    found = [note.place.hint for note in notes.values() if note is not None and note.place is not None]
    return "".join(f" {hint}" for hint in dict.fromkeys(filter(None, found)))

"""Calls that several ranks make together, some of which never come.

Waiting for them until a timeout of minutes helps nobody, and giving up after seconds would end runs in which
a rank is merely slow. So those that have come look for a proof that another one is not on its way::

    it is in another call that needs this rank, and has made as many calls together with it
    it waits in a collective of torch.distributed that needs this rank
    it has come to the end of its script, has called sw.shutdown(), or has ended

With a proof they fail at once; without one they warn after some seconds, and name the ranks and their places.
"""

import time
from collections.abc import Callable, Sequence

import torch

from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.purpose import Purpose
from shardwright.comm.whereabouts import Note, Place, Store, Whereabouts
from shardwright.errors import PeerLostError, PeerTimeoutError, TraceMismatchError, UsageError

__all__ = ["RollCall"]

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05
_FIRST_LOOK_S = 0.25
_LONGEST_LOOK_S = 1.0
# All that wait read what each of the others has said: with more ranks, less often.
_LOOK_S_PER_RANK = 0.02
_SURELY_WAITS_S = 1.5
_LONGEST_NAME = 64
_REMEDY = "Call it on all of them, in the same order, and not under `if sw.rank() == 0:`."


class RollCall:
    """Waits for ranks that are to make a call together.

    Args:
        store: shared by all ranks.
        whereabouts: of this rank.
        rank: this one.
        patience_s: when to warn of ranks that have not come.
        timeout_s: when to give up.
        local: ways to the other ranks of this host.
        tell: gets a warning.
    """

    def __init__(
        self,
        store: Store,
        whereabouts: Whereabouts,
        *,
        rank: int,
        patience_s: float,
        timeout_s: float,
        local: LocalPeers | None,
        tell: Callable[[str], None],
    ):
        self._store = store
        self._whereabouts = whereabouts
        self._rank = rank
        self._patience_s = patience_s
        self._timeout_s = timeout_s
        self._local = local
        self._tell = tell
        self._last_keys: dict[tuple[int, ...], str] = {}

    def meet(self, where: str, ranks: Sequence[int]) -> None:
        """Returns when all of these ranks have come to this call.

        Args:
            where: the call, for messages.
            ranks: world ranks, the same ones in the same order on all of them.

        Raises:
            UsageError: one of them is elsewhere, and will not come.
            TraceMismatchError: one of them is in a step, on this host.
            PeerTimeoutError: one of them has not come within the timeout.
            PeerLostError: one of them has ended.
        """
        others = tuple(rank for rank in ranks if rank != self._rank)
        if not others:
            return
        with self._whereabouts.inside(where, ranks, waits=True) as place:
            wait = _Wait(place, others, self._whereabouts, self._rank, self._patience_s, self._tell)
            try:
                if self._local is not None and all(other in self._local for other in others):
                    self._meet_on_this_host(place, others, self._local, wait)
                else:
                    self._meet_at_store(place, others, wait)
            except TraceMismatchError as error:
                raise TraceMismatchError(f"{_needs(place)}: {error}") from error
            except PeerLostError as error:
                if error.rank is not None:
                    wait.refuse_ended(error.rank)
                raise type(error)(f"{_needs(place)}: {error}", rank=error.rank) from error

    # ---- on one host ----

    def _meet_on_this_host(
        self, place: Place, others: Sequence[int], local: LocalPeers, wait: "_Wait"
    ) -> None:
        mine = torch.frombuffer(bytearray(_padded(place.where)), dtype=torch.uint8)
        for other in others:
            local.send(mine, other, Purpose.MEETING)
        for other in others:
            theirs = torch.zeros_like(mine)
            local.wait(local.post(theirs, other, Purpose.MEETING), other, look=wait.look)
            said = bytes(theirs.tolist()).decode(errors="replace").strip()
            if said != place.where[:_LONGEST_NAME]:
                raise _crossing(self._rank, place.where, other, said)

    # ---- over several hosts ----

    def _meet_at_store(self, place: Place, others: Sequence[int], wait: "_Wait") -> None:
        key = f"{self._whereabouts.prefix}/met/{place.key}"
        deadline_s = time.monotonic() + self._timeout_s
        try:
            self._store.add(key, 1)
            pause_s = _FIRST_PAUSE_S
            while int(self._store.get(key)) <= len(others):
                self._refuse_ended(others)
                wait.look()
                if time.monotonic() > deadline_s:
                    raise wait.too_late(self._timeout_s)
                time.sleep(pause_s)
                pause_s = min(1.5 * pause_s, _LONGEST_PAUSE_S)
            if self._rank < min(others):
                self._forget_the_last(place, key)
        except RuntimeError as error:
            if isinstance(error, UsageError | PeerLostError):
                raise
            raise PeerLostError(
                f"the job's store does not answer: rank 0, or the launcher, serves it, and has ended or "
                f"cannot be reached ({str(error).splitlines()[0]})"
            ) from error

    def _refuse_ended(self, others: Sequence[int]) -> None:
        """Refuses to wait for a rank of this host that has closed its connection."""
        if self._local is None:
            return
        for other in others:
            if other in self._local and self._local.has_ended(other):
                raise PeerLostError(f"rank {other} has ended", rank=other)

    def _forget_the_last(self, place: Place, key: str) -> None:
        """Removes the key of the call before: all have come to this one, so all have left that one."""
        last = self._last_keys.get(place.ranks)
        if last is not None:
            self._store.delete_key(last)
        self._last_keys[place.ranks] = key


class _Wait:
    """The ranks that one call waits for.

    Args:
        place: the call.
        others: who else is to come.
        whereabouts: of this rank.
        rank: this one.
        patience_s: when to warn.
        tell: gets the warning.
    """

    def __init__(
        self,
        place: Place,
        others: Sequence[int],
        whereabouts: Whereabouts,
        rank: int,
        patience_s: float,
        tell: Callable[[str], None],
    ):
        self._place = place
        self._others = tuple(others)
        self._whereabouts = whereabouts
        self._rank = rank
        self._patience_s = patience_s
        self._tell = tell
        self._begin_s = time.monotonic()
        self._pause_s = _FIRST_LOOK_S
        self._next_s = self._begin_s + self._pause_s
        self._longest_s = max(_LONGEST_LOOK_S, _LOOK_S_PER_RANK * len(self._others))
        self._has_looked = self._has_proof = self._has_told = False
        self._joint: dict[int, Note] = {}

    def look(self) -> float:
        """Looks what the missing ranks have said, if it is time for that.

        Returns:
            Seconds until the next time.

        Raises:
            UsageError: one of them will not come.
        """
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._whereabouts.publish()
            if self._has_looked:  # else others that wait have not said so yet
                self._look(now_s - self._begin_s)
            self._has_looked = True
            self._pause_s = _FIRST_LOOK_S if self._has_proof else min(2 * self._pause_s, self._longest_s)
            self._next_s = time.monotonic() + self._pause_s
        return max(self._next_s - time.monotonic(), 0.0)

    def too_late(self, timeout_s: float) -> PeerTimeoutError:
        """The error when the timeout has come."""
        missing = self._missing()
        return PeerTimeoutError(
            f"{_named(missing)} not come within {timeout_s:g} s: {self._places(missing)}. It hangs, or is at "
            "another place of the script; its log may tell. If it may take longer, raise the setting "
            "timeout_s.",
            rank=next(iter(missing), None),
        )

    def _look(self, waited_s: float) -> None:
        missing = self._missing()
        if not missing:
            return
        proofs = {r: n for r, n in missing.items() if n is not None and self._will_not_come(r, n)}
        if proofs and not self._has_proof:  # look once more: whoever comes just now is not to be named
            self._has_proof = True
        elif proofs:
            raise self._hopeless(missing, proofs, waited_s)
        arrived = {self._rank, *self._others} - set(missing)
        if waited_s >= self._patience_s and not self._has_told:
            self._has_told = True
            if self._rank == min(arrived):
                self._tell(
                    f"{_needs(self._place)}. {_named(missing)} not come after {waited_s:.0f} s: "
                    f"{self._places(missing)}. The others wait."
                )

    def refuse_ended(self, rank: int) -> None:
        """Raises if a rank that was lost has said why before."""
        note = self._whereabouts.of(rank)
        if note is not None and note.ended:
            raise self._hopeless({rank: note}, {rank: note}, time.monotonic() - self._begin_s) from None

    def _hopeless(
        self, missing: "dict[int, Note | None]", proofs: dict[int, Note], waited_s: float
    ) -> UsageError | PeerLostError:
        text = (
            f"{_needs(self._place)}. {_named(missing)} not come after {waited_s:.0f} s, and will not: "
            f"{self._places(proofs)}."
        )
        failed = next((rank for rank, note in proofs.items() if note.failed), None)
        return UsageError(f"{text} {_REMEDY}") if failed is None else PeerLostError(text, rank=failed)

    def _missing(self) -> dict[int, Note | None]:
        """Ranks that have not come, with what they have said last."""
        notes = {other: self._whereabouts.of(other) for other in self._others}
        return {
            other: note
            for other, note in notes.items()
            if note is None or note.place is None or note.place.key != self._place.key
        }

    def _will_not_come(self, rank: int, note: Note) -> bool:
        if note.ended:
            return True
        if note.place is not None and self._rank in note.place.ranks:
            # Both are in the call that is their last common one; an older note tells nothing of now.
            return note.common_calls(self._rank) >= self._whereabouts.note().common_calls(rank)
        if note.joint is None or self._rank not in note.joint[1]:
            return False
        # A collective may be done on this rank and not yet on another one: it must have been there for long.
        first = self._joint.setdefault(rank, note)
        if (first.joint, first.line) != (note.joint, note.line) or note.seconds < first.seconds:
            self._joint[rank] = first = note
        return note.seconds - first.seconds >= _SURELY_WAITS_S

    def _places(self, notes: "dict[int, Note | None] | dict[int, Note]") -> str:
        told = [
            f"rank {rank} {'has said nothing of its place' if note is None else note}"
            for rank, note in list(notes.items())[:8]
        ]
        return "; ".join(told) + (f"; and {len(notes) - 8} more" if len(notes) > 8 else "")


def _needs(place: Place) -> str:
    return f"{place.where} is to be called by all of ranks {_listed(place.ranks)}"


def _named(ranks: "dict[int, Note | None]") -> str:
    return f"Rank{'s' * (len(ranks) > 1)} {_listed(tuple(ranks))} {'have' if len(ranks) > 1 else 'has'}"


def _listed(ranks: Sequence[int]) -> str:
    """Numbers, with runs of them shortened.

    >>> _listed((0, 1, 2, 3, 6))
    '0 to 3, 6'
    """
    parts: list[str] = []
    begin = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            first, last = ranks[begin], ranks[i - 1]
            if last - first > 1:
                parts.append(f"{first} to {last}")
            else:
                parts += map(str, ranks[begin:i])
            begin = i
    return ", ".join(parts)


def _padded(where: str) -> bytes:
    return where.encode()[:_LONGEST_NAME].ljust(_LONGEST_NAME)


def _crossing(rank: int, where: str, other: int, said: str) -> UsageError:
    return UsageError(
        f"rank {rank} calls {where} where rank {other} calls {said}. Both are collective: call them on every "
        "rank, in the same order."
    )

"""Joint calls of several ranks, some of which may never come.

A wait until a timeout of minutes helps nobody, and a timeout of seconds would end runs with a merely slow
rank. So the ranks that have come check whether the others are on their way: see `missing_ranks`.

On one host each rank hears directly which others have come, and checks for itself. Over several hosts they
meet at the store, which all of them share: there one rank checks, and all fail together.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shardwright.comm.local_link import LocalReceipt
from shardwright.comm.local_peers import LocalPeers
from shardwright.comm.meeting_place import MeetingPlace, is_of_before, message_of, no_message, other_call
from shardwright.comm.message_names import Purpose, listed
from shardwright.comm.missing_ranks import Attendance, Decision, MissingRanks, Terms
from shardwright.comm.whereabouts import Store, Whereabouts
from shardwright.errors import LaunchError, PeerLostError, ShardwrightError, TraceMismatchError, UsageError

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.05
# All ranks together ask the store so often at most.
_QUESTIONS_PER_S = 2000


@dataclass(frozen=True, slots=True)
class Call:
    """A call that several ranks make together.

    Attributes:
        where: the call as this rank's script writes it.
        ranks: world ranks that make it, the same ones in the same order on all of them.
        name: what all of them call it, where they make it by different calls, as a sender and a receiver do.
        terms: what is said where some do not come; None for a call that is the same on all ranks.
    """

    where: str
    ranks: tuple[int, ...]
    name: str = ""
    terms: Terms | None = None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A call to which this rank has come.

    Attributes:
        attendance: who has come, at the store; None on one host.
        is_first: this rank may be the first that has come.
    """

    call: Call
    place: MeetingPlace
    others: tuple[int, ...]
    attendance: Attendance | None = None
    is_first: bool = True


class RollCall:
    """Waits for ranks that are to make a call together."""

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
        self._last: dict[tuple[int, ...], Attendance] = {}
        self._meetings: dict[tuple[int, ...], int] = {}
        # The first call that failed on this rank, and on others maybe not, by ranks: the error's text, as
        # the error itself would keep the frames of the script alive, with all tensors there.
        self._failed: dict[tuple[int, ...], str] = {}
        self._process_id = os.getpid()

    def meet(self, where: str, ranks: Sequence[int]) -> None:
        """Returns when all of these ranks have come to this call; see `meet_each`."""
        self.meet_each([Call(where, tuple(ranks))])

    def meet_each(self, calls: Sequence[Call]) -> None:
        """Returns when all ranks of all these calls have come; none of these calls waits for another one."""
        joint = [call for call in calls if set(call.ranks) != {self._rank}]
        for call in joint:
            self.refuse_in_a_child(call.where)
            self._refuse_after_failure(call)
        unfinished = [call for call in joint if self._is_on_this_host(call)]
        try:
            for begun in [self._begin(call) for call in joint]:
                with self._whereabouts.at(begun.place):
                    if begun.attendance is None:
                        self._finish_on_this_host(begun)
                        unfinished.remove(begun.call)
                    else:
                        self._finish_at_store(begun, begun.attendance)
        except Exception as error:
            for call in unfinished:  # of which others may have heard
                self._failed.setdefault(call.ranks, f"{type(error).__name__}: {error}")
            raise

    def _is_on_this_host(self, call: Call) -> bool:
        return self._local is not None and all(r in self._local for r in call.ranks if r != self._rank)

    def _begin(self, call: Call) -> _Begun:
        """Says that this rank has come."""
        others = tuple(rank for rank in call.ranks if rank != self._rank)
        self._meetings[call.ranks] = meeting = self._meetings.get(call.ranks, 0) + 1
        place = self._whereabouts.begin(call.where, call.ranks, name=call.name, meeting=meeting)
        if self._local is not None and self._is_on_this_host(call):
            begun = _Begun(call, place, others)
            try:
                for other in others:
                    self._local.send(message_of(place), other, Purpose.MEETING)
            except PeerLostError as error:
                raise self._missing(begun, list).lost(error) from error
            return begun
        attendance = Attendance(self._store, self._whereabouts.prefix, place, self._rank)
        with _store_answers(self._terms(call)):
            return _Begun(call, place, others, attendance, attendance.come())

    def refuse_in_a_child(self, where: str) -> None:
        """A fork has the connections of its rank: what both say over them would be mixed up."""
        if os.getpid() != self._process_id:
            raise UsageError(
                f"{where} is called in process {os.getpid()}, which rank {self._rank} has started (a worker "
                "of a DataLoader, or of a pool), and only a rank itself can talk to others. Call it in the "
                "script's own process, and give what came of it to the worker."
            )

    def _refuse_after_failure(self, call: Call) -> None:
        """Each rank of a host fails for itself: the others would take this call for the one that failed."""
        if (failure := self._failed.get(call.ranks)) is not None:
            raise UsageError(
                f"{call.where} is called on rank {self._rank} after a call of the same ranks has failed "
                "there, so that ranks no longer meet in the same calls. Let the script end where a call "
                f"fails. The failure was {failure}"
            )

    def _terms(self, call: Call) -> Terms:
        return call.terms or Terms(
            f"{call.where} is to be called by all of ranks {listed(call.ranks)}",
            "Call it on all of them, in the same order, and not under "
            f"`if {ShardwrightError.library}.rank() == 0:`.",
        )

    def _missing(self, begun: _Begun, absent: Callable[[], Sequence[int]]) -> MissingRanks:
        return MissingRanks(
            begun.place,
            self._terms(begun.call),
            self._whereabouts,
            rank=self._rank,
            patience_s=self._patience_s,
            tell=self._tell,
            absent=absent,
            takes_turn=None if begun.attendance is None else begun.attendance.takes_turn,
            is_first=begun.is_first,
        )

    # ---- on one host ----

    def _finish_on_this_host(self, begun: _Begun) -> None:
        assert self._local is not None
        local = self._local
        receipts: dict[int, LocalReceipt] = {
            other: local.post(no_message(), other, Purpose.MEETING) for other in begun.others
        }
        missing = self._missing(begun, lambda: [r for r, receipt in receipts.items() if not receipt.arrived])
        try:
            for other in begun.others:
                local.wait(receipts[other], other, look=missing.look)
                while is_of_before(receipts[other].tensor, begun.place):  # of a call that failed here
                    receipts[other] = local.post(no_message(), other, Purpose.MEETING)
                    local.wait(receipts[other], other, look=missing.look)
                if (said := other_call(receipts[other].tensor, begun.place)) is not None:
                    raise self._crossing(begun.call, other, said)
        except TraceMismatchError as error:
            raise TraceMismatchError(f"{self._terms(begun.call).needs}: {error}") from error
        except PeerLostError as error:
            raise missing.lost(error) from error

    def _crossing(self, call: Call, other: int, said: str) -> UsageError:
        advice = f"in the same order. {self._terms(call).remedy}" if call.terms else "in the same order."
        return UsageError(
            f"rank {self._rank} calls {call.where} where rank {other} calls {said}. Both are collective: "
            f"call them on every rank, {advice}"
        )

    # ---- over several hosts ----

    def _finish_at_store(self, begun: _Begun, attendance: Attendance) -> None:
        missing = self._missing(begun, attendance.absent)
        with _store_answers(self._terms(begun.call)):
            try:
                decision = self._decision(begun, attendance, missing)
            except (UsageError, PeerLostError) as error:
                decision = attendance.decide(Decision(error))
            if decision.error is not None:
                raise decision.error
            if (last := self._last.get(begun.place.ranks)) is not None:
                last.forget()  # all have come to this call, so all have left that one
            self._last[begun.place.ranks] = attendance

    def _decision(self, begun: _Begun, attendance: Attendance, missing: MissingRanks) -> Decision:
        deadline_s = time.monotonic() + self._timeout_s
        pause_s = _FIRST_PAUSE_S
        longest_s = max(_LONGEST_PAUSE_S, len(begun.place.ranks) / _QUESTIONS_PER_S)
        while (decision := attendance.decision()) is None:
            try:
                self._refuse_ended(begun.others)
            except PeerLostError as error:
                raise missing.lost(error) from error
            missing.look()
            if time.monotonic() > deadline_s:
                raise missing.too_late(self._timeout_s)
            time.sleep(pause_s)
            pause_s = min(1.5 * pause_s, longest_s)
        return decision

    def _refuse_ended(self, others: Sequence[int]) -> None:
        """Refuses to wait for a rank of this host that has closed its connection."""
        if self._local is None:
            return
        for other in others:
            if other in self._local and self._local.has_ended(other):
                raise PeerLostError(f"rank {other} has ended", rank=other)


@contextmanager
def _store_answers(terms: Terms) -> Iterator[None]:
    """Says what it means where the store does not answer."""
    try:
        yield
    except RuntimeError as error:
        if isinstance(error, UsageError | PeerLostError | LaunchError):
            raise
        first_line = str(error).partition("\n")[0]
        raise PeerLostError(
            f"{terms.needs}: the job's store does not answer: rank 0, or the launcher, serves it, and has "
            f"ended or cannot be reached ({first_line})"
        ) from error

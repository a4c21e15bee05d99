"""Where a rank is in its script, so that ranks that wait for it in vain can say so.

A rank counts the calls that several ranks make together. Two ranks that are in their k-th common call must be
in the same one: where they are not, each waits for the other for ever, however slow they are. ::

    rank 0    step 1   step 2   model.state_dict()    3rd common call
    rank 1    step 1   step 2   step 3                3rd common call: another one, so rank 1 will not come

A rank that gets on tells nobody anything. One that has been at one place for some seconds leaves a note at
the store, by a thread of its own, for it may be inside of a call into C++.
"""

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from shardwright.comm.python_place import joint_call, script_line

__all__ = ["Note", "Place", "Store", "Whereabouts"]

_TICK_S = 0.5
_STUCK_S = 1.5
_NOTE_EVERY_S = 2.0
_LAST_NOTE_S = 2.0


class Store(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def add(self, key: str, amount: int) -> int: ...

    def delete_key(self, key: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Place:
    """A call that several ranks make together.

    Attributes:
        where: the call, for messages.
        ranks: who makes it.
        number: how many calls these ranks have made together by now, this one among them.
        waits: nobody leaves it before all of these ranks have come.
    """

    where: str
    ranks: tuple[int, ...]
    number: int
    waits: bool = False

    @property
    def key(self) -> str:
        """A name that the same call has on all of its ranks, and no other call of the run."""
        return f"{','.join(map(str, self.ranks))}/{self.number}/{self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """Where a rank is.

    Attributes:
        place: the call that it is in; None where it is in none.
        counts: for each set of ranks, how many calls it has made with them.
        seconds: how long it has been there.
        line: of its script.
        ended: why it will make no more calls; empty where it may.
        failed: it has ended with an error.
        joint: a function of `torch.distributed` that it waits in, and the ranks that must call it.
    """

    place: Place | None = None
    counts: tuple[tuple[tuple[int, ...], int], ...] = ()
    seconds: float = 0.0
    line: str = ""
    ended: str = ""
    failed: bool = False
    joint: tuple[str, tuple[int, ...]] | None = None

    def common_calls(self, rank: int) -> int:
        """How many calls it has made together with another rank."""
        return sum(count for ranks, count in self.counts if rank in ranks)

    def to_text(self) -> str:
        """What stands at the store."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: bytes | str) -> "Note":
        """Reads it."""
        found: dict[str, Any] = json.loads(text)
        place, joint = found.pop("place"), found.pop("joint")
        if place is not None:
            place = Place(**{**place, "ranks": tuple(place["ranks"])})
        counts = tuple((tuple(ranks), count) for ranks, count in found.pop("counts"))
        return cls(
            place=place, counts=counts, joint=None if joint is None else (joint[0], tuple(joint[1])), **found
        )

    def __str__(self) -> str:
        if self.ended:
            return self.ended
        since = f" for {self.seconds:.0f} s" if self.seconds >= 1 else ""
        at = f" ({self.line})" if self.line else ""
        if self.place is not None:
            return f"is in {self.place.where}{at}{since}"
        if self.joint is not None:
            return f"waits in torch.distributed.{self.joint[0]}{at}{since}"
        return f"is at {self.line}{since}" if self.line else "is elsewhere in the script"


class Whereabouts:
    """Where this rank is, and what the others have said of theirs.

    Args:
        store: shared by all ranks.
        rank: this one.
        run: how many runs this process has begun before: all ranks begin them together.
        confess: called with the error with which the script ends.
    """

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        run: int = 0,
        confess: Callable[[BaseException], None] = lambda error: None,
    ):
        self._store = store
        self._rank = rank
        self._run = run
        self._counts: Counter[tuple[int, ...]] = Counter()
        self._place: Place | None = None
        self._moves = 0
        self._moved_s = time.monotonic()
        self._thread_id = threading.get_ident()
        self._process_id = os.getpid()
        self._confess = confess
        self._ended = ""
        self._failed = False
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    # ---- of this rank ----

    @contextmanager
    def inside(self, where: str, ranks: Sequence[int], *, waits: bool = False) -> Iterator[Place]:
        """Says that this rank makes a call that others make, too.

        Args:
            where: the call, for messages.
            ranks: world ranks that make it; all in the same order.
            waits: nobody leaves it before all have come.
        """
        scope = tuple(ranks)
        self._counts[scope] += 1
        before, self._place = self._place, Place(where, scope, self._counts[scope], waits)
        self._move()
        try:
            yield self._place
        finally:
            self._place = before
            self._move()

    def _move(self) -> None:
        self._moves += 1
        self._moved_s = time.monotonic()

    def note(self) -> Note:
        """Where this rank is now."""
        frame = sys._current_frames().get(self._thread_id)
        place = self._place
        return Note(
            place=place,
            counts=tuple(self._counts.items()),
            seconds=time.monotonic() - self._moved_s,
            line="" if frame is None else script_line(frame),
            joint=joint_call(frame) if frame is not None and place is None else None,
            ended=self._ended,
            failed=self._failed,
        )

    def publish(self) -> None:
        """Tells the others now."""
        self._store.set(self._key(self._rank), self.note().to_text())

    # ---- of others ----

    def of(self, rank: int) -> Note | None:
        """What another rank has said last; None where it has not said anything."""
        key = self._key(rank)
        return Note.from_text(self._store.get(key)) if self._store.check([key]) else None

    @property
    def prefix(self) -> str:
        """Of keys at the store that belong to this run."""
        return f"shardwright/whereabouts/{self._run}"

    def _key(self, rank: int) -> str:
        return f"{self.prefix}/{rank}"

    # ---- the thread ----

    def watch(self) -> None:
        """Begins to leave notes while this rank does not get on; ends with the process, or by `close`."""
        self._thread = threading.Thread(target=self._watch, name="shardwright-whereabouts", daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def close(self, why: str) -> None:
        """Says that this rank makes no more calls.

        Args:
            why: as a sentence about it, such as "has called sw.shutdown()".
        """
        if self._thread is None or os.getpid() != self._process_id:
            return
        atexit.unregister(self._at_exit)
        self._ended = self._ended or why
        self._closed.set()
        self._thread.join(_LAST_NOTE_S)
        self._thread = None

    def script_ended(self, error: BaseException | None = None) -> None:
        """Says that the script has ended, with an error or without.

        Args:
            error: with which it ends.
        """
        if error is None:
            self.close("has come to the end of its script")
            return
        if self._thread is not None and os.getpid() == self._process_id:
            self._confess(error)
        self._failed = True
        first_line = str(error).partition("\n")[0][:500]
        self.close(f"has ended with {type(error).__name__}: {first_line}")

    def _at_exit(self) -> None:
        self.script_ended(getattr(sys, "last_exc", None) or getattr(sys, "last_value", None))

    def _watch(self) -> None:
        seen, next_s = -1, 0.0
        # The store goes with the process that serves it; then nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            while not self._closed.wait(_TICK_S):
                now_s = time.monotonic()
                if self._moves != seen:
                    seen, next_s = self._moves, now_s + _STUCK_S
                elif now_s >= next_s:
                    self.publish()
                    next_s = now_s + _NOTE_EVERY_S
            self.publish()

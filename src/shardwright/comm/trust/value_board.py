"""A board of small values: one rank posts them, others read them when needed, now and then.

::

    rank 1: put("mb 0", loss)                       goes on
    rank 0:              ...        get("mb 0")     waits until it is there

No rank has to know which others will read, and an unread value costs only the message to the store. Where a
rank has come by is told when it does not get on, by the thread that tells where it is: who waits for a value
in vain keeps all others waiting, too.
"""

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from shardwright.comm.trust.seal import not_from_a_stranger
from shardwright.errors import PeerLostError, PeerTimeoutError

__all__ = ["ValueBoard"]

_LARGEST = 4 * 2**20  # bytes in one message; the store takes no more than 8 MiB
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 2e-3
_DONE = "done"
_PATIENCE_S = 0.25  # from one look at whether the other rank goes on to the next


class _Store(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


class ValueBoard:
    """The values that ranks post, batch by batch.

    Attributes:
        waited_s: for values, since the batch began.
    """

    def __init__(
        self,
        store: _Store,
        ranks: Sequence[int],
        *,
        rank: int,
        has_ended: Callable[[int], bool],
        timeout_s: float,
    ):
        self._store = store
        self._ranks = tuple(ranks)
        self._rank = rank
        self._has_ended = has_ended
        self._timeout_s = timeout_s
        self.waited_s = 0.0
        self._batch = -1
        self._mine: list[str] = []
        self._marks: dict[str, int] = {}

    def begin(self) -> None:
        """A batch begins; all ranks say so."""
        self._batch += 1
        self.waited_s = 0.0

    def put(self, key: str, value: bytes) -> None:
        """Puts up a value, under a name of its own in this batch."""
        parts = [value[at : at + _LARGEST] for at in range(0, len(value), _LARGEST)]
        for number, part in enumerate(parts[1:]):
            self._set(f"{key}/{number}", part)
        # The first one is there when all are.
        self._set(key, b"%d\n" % (len(parts) - 1) + (parts[0] if parts else b""))

    def mark(self, key: str) -> None:
        """Notes that this rank has come by somewhere in this batch; `tell` says so."""
        self._marks[key] = self._batch

    def tell(self) -> None:
        """Tells the others where this rank has come by; from any thread."""
        for key, batch in self._marks.copy().items():
            self._store.set(f"{key}/{self._rank}", b"%d" % batch)

    def get(
        self,
        keys: Sequence[str],
        source: int,
        absent: Exception,
        *,
        is_late: bool = False,
        mark: str = "",
    ) -> tuple[str, bytes]:
        """Waits for one of several values; returns its name, and the value."""
        begin_s = time.monotonic()
        key = self._first_of(keys, source, absent, is_through=is_late, mark=mark)
        self.waited_s += time.monotonic() - begin_s
        num_further, _, first = self._store.get(self._name(key)).partition(b"\n")
        with not_from_a_stranger("a value of a step"):
            number_of_parts = int(num_further)
        further = (self._store.get(self._name(f"{key}/{number}")) for number in range(number_of_parts))
        return key, b"".join((first, *further))

    def done(self) -> None:
        """This rank puts up nothing more in this batch."""
        self.mark(_DONE)

    def clear(self) -> None:
        """Removes what this rank has posted: all ranks have finished the batch."""
        for name in self._mine:
            self._store.delete_key(name)
        self._mine.clear()

    def _first_of(
        self, keys: Sequence[str], source: int, absent: Exception, *, is_through: bool, mark: str
    ) -> str:
        pause_s, begin_s, next_look_s, ended = _SHORTEST_PAUSE_S, time.monotonic(), _PATIENCE_S, False
        rank = self._ranks[source]
        while True:
            for key in keys:
                if self._store.check([self._name(key)]):
                    return key
            if is_through:
                raise absent
            waited_s = time.monotonic() - begin_s
            if ended:
                raise PeerLostError(f"waiting for a value of rank {rank} failed: it has ended", rank=rank)
            if waited_s > self._timeout_s:
                raise PeerTimeoutError(
                    f"waiting for a value of rank {rank} failed: no answer within {self._timeout_s:g} s",
                    rank=rank,
                )
            if waited_s > next_look_s:
                next_look_s += _PATIENCE_S
                is_through = self._has_marked(source, _DONE) or self._has_marked(source, mark)
                ended = self._has_ended(rank)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _has_marked(self, source: int, key: str) -> bool:
        name = f"{key}/{source}"
        if not key or not self._store.check([name]):
            return False
        with not_from_a_stranger(f"how far rank {self._ranks[source]} is"):
            return int(self._store.get(name)) >= self._batch

    def _set(self, key: str, value: bytes) -> None:
        name = self._name(key)
        self._store.set(name, value)
        self._mine.append(name)

    def _name(self, key: str) -> str:
        return f"{self._batch}/{key}"

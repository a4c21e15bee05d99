"""Chooses which of several things to keep at hand when not all fit, in pure logic.

Batches mostly use things in the order of the previous batch. So the thing used next can be fetched early, and
the thing with the farthest next use makes room::

    the last batch    a b c d | d c b a
    this one          a b         is used: c, on its way: d; the next use of a is the farthest, so a goes
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from math import inf

__all__ = ["LiveWindow", "Move"]

# A batch that skips at most so many uses of the one before is still thought to go on as that did.
_MOST_SKIPPED = 8


@dataclass(frozen=True, slots=True)
class Move:
    """The next move.

    Attributes:
        comes: start to bring it; else let it go.
    """

    item: int
    comes: bool


class LiveWindow:
    """Decides which things to fetch and which to release; equal uses give equal decisions.

    Attributes:
        most: the largest sum of sizes so far.

    >>> window = LiveWindow([1, 1], capacity=1)
    >>> window.use([0]), window.use([1])
    ([Move(item=0, comes=True)], [Move(item=0, comes=False), Move(item=1, comes=True)])
    """

    def __init__(self, sizes: Sequence[int], capacity: int):
        self._sizes = sizes
        self._capacity = capacity
        self._at_hand: dict[int, int] = {}  # item -> when it was used or brought; in that order
        self._clock = 0
        self._used: list[int] = []
        self._forecast = _Forecast(())
        self._place = 0
        self.most = 0

    def begin(self) -> list[Move]:
        """Starts a batch with nothing at hand."""
        self._at_hand.clear()
        self._forecast, self._used, self._place = _Forecast(self._used), [], 0
        return list(self._ahead(()))

    def use(self, items: Collection[int]) -> list[Move]:
        """Things are used, together."""
        for item in items:
            if self._used[-1:] == [item]:
                continue
            self._used.append(item)
            place = self._forecast.next_use(item, self._place)
            if place - self._place <= _MOST_SKIPPED:
                self._place = int(place) + 1
        # A use that needed more than there is room for may have left more.
        moves = list(self._make_room(0, items, inf))
        for item in items:
            if item not in self._at_hand:
                moves += self._make_room(self._sizes[item], items, inf)
                moves.append(self._bring(item))
            self._touch(item)
        moves += self._ahead(items)
        return moves

    @property
    def size(self) -> int:
        """The size of the things at hand or on their way."""
        return sum(self._sizes[item] for item in self._at_hand)

    def _ahead(self, kept: Collection[int]) -> Iterator[Move]:
        """Brings what is used next, up to half of what there is room for."""
        size = 0
        for item, place in self._forecast.coming(self._place):
            size += self._sizes[item]
            if size > self._capacity // 2:
                return
            if item in self._at_hand:
                continue
            later = [other for other in self._at_hand if other not in kept and self._next(other) > place]
            if self.size - sum(self._sizes[o] for o in later) + self._sizes[item] > self._capacity:
                return
            yield from self._make_room(self._sizes[item], kept, place)
            yield self._bring(item)

    def _next(self, item: int) -> float:
        """The place of the next use in the forecast."""
        return self._forecast.next_use(item, self._place)

    def _make_room(self, size: int, kept: Collection[int], before: float) -> Iterator[Move]:
        """Releases what is used latest, and not before a place of the forecast."""
        while self._at_hand and self.size + size > self._capacity:
            candidates = [item for item in self._at_hand if item not in kept]
            if not candidates:
                return
            victim = max(candidates, key=lambda item: (self._next(item), -self._at_hand[item]))
            if before != inf and self._next(victim) <= before:
                return
            del self._at_hand[victim]
            yield Move(victim, comes=False)

    def _bring(self, item: int) -> Move:
        self._touch(item)
        self.most = max(self.most, self.size)
        return Move(item, comes=True)

    def _touch(self, item: int) -> None:
        self._clock += 1
        self._at_hand[item] = self._clock


class _Forecast:
    """The uses of the batch before."""

    def __init__(self, uses: Sequence[int]):
        self._uses = uses
        self._places: dict[int, list[int]] = {}
        for place, item in enumerate(uses):
            self._places.setdefault(item, []).append(place)

    def next_use(self, item: int, start: int) -> float:
        """The place of the next use; infinite where there is none."""
        places = self._places.get(item, [])
        found = bisect_left(places, start)
        return places[found] if found < len(places) else inf

    def coming(self, start: int) -> Iterator[tuple[int, int]]:
        """The things used from a place on, each once, with the place."""
        seen = set()
        for place in range(start, len(self._uses)):
            item = self._uses[place]
            if item not in seen:
                seen.add(item)
                yield item, place

"""Gathers each parameter's rows before its first use, and chooses what to keep at hand.

Batches mostly use things in the order of the previous batch. So the thing used next can be fetched early, and
the thing with the farthest next use makes room::

    the last batch    a b c d | d c b a
    this one          a b         is used: c, on its way: d; the next use of a is the farthest, so a goes
"""

import logging
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import inf
from typing import Any

import torch
from torch import Tensor

from shardwright.torch.sharding.parcel import Parcel, SavedRows
from shardwright.torch.sharding.sharded_parameter import Bring, absent_arguments_brought

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


class _LiveWindow:
    """Decides which things to fetch and which to release; equal uses give equal decisions.

    Attributes:
        most: the largest sum of sizes so far.

    >>> window = _LiveWindow([1, 1], capacity=1)
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


log = logging.getLogger(__name__)


class AllAtOnce:
    """Gathers all rows at the start of a step, in the order of use, and keeps them.

    Attributes:
        to_come: id of a parameter -> number of its parcel, for those that are to be asked for.
    """

    def __init__(self, parcels: Sequence[Parcel], to_come: dict[int, int]):
        self._parcels = parcels
        self._gathers = any(parcel.memory.gathers for parcel in parcels)
        self.to_come = to_come

    def begin(self) -> None:
        """Starts to gather; no rows are here except those that need no gathering."""
        for number, parcel in enumerate(self._parcels):
            if not parcel.is_here:
                parcel.gather()
                self.to_come.update((id(each.parameter), number) for each in parcel.parameters)

    def use(self, *numbers: int) -> None:
        """Has parcels at hand, all of them together."""
        for number in numbers:
            self._parcels[number].arrive()
            for each in self._parcels[number].parameters:
                self.to_come.pop(id(each.parameter), None)

    def use_all(self) -> None:
        """Waits for all."""
        self.use(*range(len(self._parcels)))

    def end(self) -> None:
        """The step has ended, and parameters are sharded again: their memory is for the next one."""
        self.to_come.clear()

    def saving(self) -> AbstractContextManager[Any]:
        """A context for what computes: custom functions get parameters that are there."""
        return absent_arguments_brought() if self._gathers else nullcontext()


class InTurns(AllAtOnce):
    """Gathers rows at their use or shortly before, and releases them when room is short.

    Ranks of a group gather together, so all of them must use the same parameters in the same order.
    """

    def __init__(self, parcels: Sequence[Parcel], to_come: dict[int, int], *, most: int, bring: Bring):
        super().__init__(parcels, to_come)
        self._bring = bring
        self._in_use: tuple[int, ...] = ()
        self._saved = SavedRows(self._memory_of, bring)
        self.window = _LiveWindow([parcel.size for parcel in parcels], most)
        largest = max(parcels, key=lambda parcel: parcel.size)
        if largest.size > most:
            log.warning(
                "sdp_max_live_parameters is %d, but %s alone has %d elements: so many are gathered at once",
                most,
                " and ".join(each.name for each in largest.parameters),
                largest.size,
            )

    def begin(self) -> None:
        """Starts to gather what is used first."""
        for number, parcel in enumerate(self._parcels):
            self.to_come.update((id(each.parameter), number) for each in parcel.parameters)
        self._in_use = ()
        self._make(self.window.begin())

    def use(self, *numbers: int) -> None:
        """Gathers the missing parcels, and waits for them."""
        if numbers == self._in_use:
            return
        self._make(self.window.use(numbers))
        for number in numbers:
            parcel = self._parcels[number]
            parcel.arrive()
            self._saved.come(number, parcel.memory.gathered())
        self._in_use = numbers

    def end(self) -> None:
        """Releases all rows."""
        self.to_come.clear()
        self._saved.end()
        for parcel in self._parcels:
            parcel.end()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Custom functions get parameters that are there; neither autograd nor autocast keeps rows."""
        cached = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)
        try:
            with absent_arguments_brought(), self._saved.in_force():
                yield
        except RuntimeError as error:
            if "saved tensor hooks" in str(error):
                error.add_note(
                    "Shardwright sets such hooks where rows of shared parameters come and go: raise "
                    "sdp_max_live_parameters, so that all come at once."
                )
            raise
        finally:
            torch.set_autocast_cache_enabled(cached)

    def _make(self, moves: Sequence[Move]) -> None:
        for move in moves:
            parcel = self._parcels[move.item]
            if move.comes:
                parcel.gather()
                continue
            if parcel.is_here:
                self._saved.go(parcel.memory.gathered())
            parcel.go(self._bring)

    def _memory_of(self, number: int) -> Tensor:
        """The memory of a parcel, with all rows."""
        self.use(number)
        return self._parcels[number].memory.gathered()

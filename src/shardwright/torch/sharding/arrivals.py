"""Gathers each parameter's rows before its first use: at the start of a step, or in order of use."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from shardwright.torch.sharding.absent_parameter import Bring, absent_arguments_brought
from shardwright.torch.sharding.live_window import LiveWindow, Move
from shardwright.torch.sharding.parcel import Parcel
from shardwright.torch.sharding.saved_rows import SavedRows

__all__ = ["AllAtOnce", "Arrivals", "InTurns"]

log = logging.getLogger(__name__)


class Arrivals(Protocol):
    """Gathers and releases rows.

    Attributes:
        to_come: id of a parameter -> number of its parcel, for those that are to be asked for.
    """

    to_come: dict[int, int]

    def begin(self) -> None:
        """Starts a step: no rows are here except those that need no gathering."""
        ...

    def use(self, *numbers: int) -> None:
        """Has parcels at hand, all of them together."""
        ...

    def end(self) -> None:
        """The step has ended, and parameters are sharded again."""
        ...

    def saving(self) -> AbstractContextManager[Any]:
        """A context for what computes."""
        ...


class AllAtOnce:
    """Gathers all rows at the start of a step, in the order of use, and keeps them."""

    def __init__(self, parcels: Sequence[Parcel], to_come: dict[int, int]):
        self._parcels = parcels
        self._gathers = any(parcel.memory.gathers for parcel in parcels)
        self.to_come = to_come

    def begin(self) -> None:
        """Starts to gather."""
        for number, parcel in enumerate(self._parcels):
            if not parcel.is_here:
                parcel.gather()
                self.to_come.update((id(each.parameter), number) for each in parcel.parameters)

    def use(self, *numbers: int) -> None:
        """Waits for parcels."""
        for number in numbers:
            self._parcels[number].arrive()
            for each in self._parcels[number].parameters:
                self.to_come.pop(id(each.parameter), None)

    def use_all(self) -> None:
        """Waits for all."""
        self.use(*range(len(self._parcels)))

    def end(self) -> None:
        """Their memory is for the next step."""
        self.to_come.clear()

    def saving(self) -> AbstractContextManager[Any]:
        """Custom functions get parameters that are there."""
        return absent_arguments_brought() if self._gathers else nullcontext()


class InTurns:
    """Gathers rows at their use or shortly before, and releases them when room is short.

    Ranks of a group gather together, so all of them must use the same parameters in the same order.
    """

    def __init__(self, parcels: Sequence[Parcel], to_come: dict[int, int], *, most: int, bring: Bring):
        self._parcels = parcels
        self.to_come = to_come
        self._bring = bring
        self._in_use: tuple[int, ...] = ()
        self._saved = SavedRows(self._memory_of, bring)
        self.window = LiveWindow([parcel.size for parcel in parcels], most)
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

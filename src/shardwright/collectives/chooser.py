"""Caches the chosen algorithms of one group by size."""

from collections import OrderedDict
from collections.abc import Collection

from shardwright.collectives.choose import OWN, Choice, choose, steps_of
from shardwright.collectives.prices import Prices
from shardwright.collectives.routine import Routine
from shardwright.collectives.topology import Topology

__all__ = ["Chooser", "size_class"]

# Objects are gathered in another size each time.
_MOST_ROUTINES = 512


class Chooser:
    """Chooses for one rank; all ranks of the group make the same choices."""

    def __init__(self, topology: Topology, rank: int, prices: Prices):
        self.prices = prices
        self._topology = topology
        self._rank = rank
        self._choices: dict[tuple[object, ...], Choice] = {}
        self._routines: OrderedDict[tuple[object, ...], Routine] = OrderedDict()

    def choice(
        self, collective: str, count: int, itemsize: int, ways: Collection[str] | None = None
    ) -> Choice:
        """The algorithm for a collective of this size, and why."""
        key = (collective, size_class(count), itemsize, None if ways is None else frozenset(ways))
        if key not in self._choices:
            self._choices[key] = choose(
                collective,
                self._topology,
                count=size_class(count),
                itemsize=itemsize,
                prices=self.prices,
                ways=ways,
            )
        return self._choices[key]

    def own_choice(self, collective: str, count: int, itemsize: int) -> Choice:
        """The best of our own algorithms."""
        return self.choice(collective, count, itemsize, OWN)

    def routine(self, choice: Choice, collective: str, count: int, source: int) -> Routine:
        """The steps of this rank."""
        key = (choice.candidate, collective, count, source)
        if key in self._routines:
            self._routines.move_to_end(key)
            return self._routines[key]
        routine = Routine.of(
            steps_of(collective, choice.candidate, self._topology, self._rank, count=count, source=source)
        )
        self._routines[key] = routine
        if len(self._routines) > _MOST_ROUTINES:
            self._routines.popitem(last=False)
        return routine


def size_class(count: int) -> int:
    """Sizes are chosen for in classes, two for each doubling; this is the largest of a class.

    >>> [size_class(count) for count in (0, 3, 100, 1000)]
    [1, 3, 128, 1024]
    """
    step = 1 << max(0, count.bit_length() - 2)
    return max(1, -(-count // step) * step)

"""Few of many combinations: those that show each pair of values.

In between: costly kinds that ``make test-thorough`` has, and so CI, but not each ``make test``.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import combinations, product
from typing import Any

import pytest

__all__ = ["chosen", "in_every_run", "in_sweep", "some_combinations", "thorough"]


def in_sweep(*values: Any, **more: Any) -> Any:
    """Values of a test's parameters that are left to the sweep: what they show, others show in every run."""
    return pytest.param(*values, marks=pytest.mark.sweep, **more)


def thorough(*values: Any, **more: Any) -> Any:
    """Values of a test's parameters that only ``make test-thorough`` has."""
    return pytest.param(*values, marks=pytest.mark.thorough, **more)


def in_every_run(
    values: Iterable[Any], kept: Collection[Any], *, in_thorough: Collection[Any] = ()
) -> list[Any]:
    """All values of a parameter; those in neither collection are left to the sweep."""
    values = list(values)
    assert all(value in values for value in (*kept, *in_thorough))
    others = {True: thorough, False: in_sweep}
    return [value if value in kept else others[value in in_thorough](value) for value in values]


def some_combinations(*axes: Sequence[Any], together: int | None = None) -> list[tuple[Any, ...]]:
    """Combinations, as parameters of a test: as few as show what others would.

    Args:
        axes: the values of each argument of the test.
        together: each choice of values of so many arguments is seen; 1: each value. By default 2 for three
            arguments or more, and 1 for two.
    """
    places = chosen([len(axis) for axis in axes], together or min(2, len(axes) - 1))
    return [tuple(axis[place] for axis, place in zip(axes, each, strict=True)) for each in sorted(places)]


def chosen(sizes: Sequence[int], together: int) -> list[tuple[int, ...]]:
    """Few combinations that contain each choice of places in so many axes: always the one with most news."""
    which = list(combinations(range(len(sizes)), together))

    def shown(combination: tuple[int, ...]) -> set[Any]:
        return {(axes, tuple(combination[axis] for axis in axes)) for axes in which}

    everything = list(product(*map(range, sizes)))
    missing = set().union(*map(shown, everything))
    found: list[tuple[int, ...]] = []

    def merit(combination: tuple[int, ...]) -> tuple[int, int]:
        # Of equals one whose values were seen least. Where pairs count, that would take more combinations.
        seen = sum(a == b for other in found for a, b in zip(combination, other, strict=True))
        return len(shown(combination) & missing), -seen if together == 1 else 0

    while missing:
        found.append(max(everything, key=merit))
        missing -= shown(found[-1])
    return found

"""Skips the argument checks of `torch.distributions` between units.

The checks read values into Python (``if not valid.all(): raise``), which only one rank has. They change
nothing else. They still run inside units, and for a distribution with ``validate_args=True``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributions import Distribution

from shardwright.torch.interception.glue import active_handler

__all__ = ["distributions_unchecked"]


class _InsideUnits:
    """The default of `Distribution`, but false between units."""

    def __init__(self, default: bool):
        self._default = default

    def __get__(self, instance: Any, owner: type) -> bool:
        return self._default and active_handler() is None


@contextmanager
def distributions_unchecked() -> Iterator[None]:
    """Distributions that are used between units do not look at values, unless they are told to."""
    kind: Any = Distribution
    before = kind.__dict__["_validate_args"]
    kind._validate_args = _InsideUnits(before)
    try:
        yield
    finally:
        kind._validate_args = before

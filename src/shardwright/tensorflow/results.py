"""Collects what a step function returns: gradients are summed as they come, all else is kept.

Over stages, pieces add to the sums themselves: see `gradient_sums`.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Results", "positions_of"]


class Results:
    """The outputs of a batch that this rank makes.

    A gradient is summed over the microbatches when it comes, so that a rank holds one of each, and not one
    for each microbatch. Microbatches end their backwards in order, so the sum has the order of a plain loop.

    Attributes:
        kept: what is not summed, of each microbatch by position.
    """

    def __init__(
        self, positions: Sequence[Mapping[str, Sequence[int]]], *, summed: Collection[int] = frozenset()
    ):
        self._positions = positions
        self._summed = summed
        self.sums: dict[int, Any] = {}
        self.kept: list[dict[int, Any]] = [{} for _ in positions]

    def take(self, microbatch: int, name: str, tensor: Any) -> None:
        """Takes a tensor that a piece has made, if it is returned."""
        for position in self._positions[microbatch].get(name, ()):
            if position not in self._summed:
                self.kept[microbatch][position] = tensor
            elif position in self.sums:
                self.sums[position] = tf.add(self.sums[position], tensor)
            else:
                self.sums[position] = tensor


def positions_of(names: Sequence[str], *, without: Collection[int] = frozenset()) -> dict[str, list[int]]:
    """Where each tensor is returned: one may be returned twice."""
    found: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        if position not in without:
            found.setdefault(name, []).append(position)
    return found

"""Collects what a step function returns: gradients are summed as they come, all else is kept."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

__all__ = ["Results"]


class Results:
    """The outputs of a batch that this rank makes.

    A gradient is summed over the microbatches when it comes, so that a rank holds one of each, and not one
    for each microbatch. Microbatches end their backwards in order, so the sum has the order of a plain loop.

    Args:
        names: of the tensors that the step function returns, for each microbatch.
        summed: positions of those that are gradients, in one tensor each.
    """

    def __init__(self, names: Sequence[Sequence[str]], *, summed: frozenset[int]):
        self._positions = [_positions(each) for each in names]
        self._summed = summed
        self.sums: dict[int, Any] = {}
        self.kept: list[dict[int, Any]] = [{} for _ in names]

    def take(self, microbatch: int, name: str, tensor: Any) -> None:
        """Takes a tensor that a piece has made, if it is returned."""
        for position in self._positions[microbatch].get(name, ()):
            if position not in self._summed:
                self.kept[microbatch][position] = tensor
            elif position in self.sums:
                self.sums[position] = tf.add(self.sums[position], tensor)
            else:
                self.sums[position] = tensor


def _positions(names: Sequence[str]) -> dict[str, list[int]]:
    """Where each tensor is returned: one may be returned twice."""
    found: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        found.setdefault(name, []).append(position)
    return found

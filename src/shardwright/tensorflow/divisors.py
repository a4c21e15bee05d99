"""What losses are divided by, where the data tell it: each microbatch gets its share of the batch's.

::

    microbatch 0   sum of weights 20 ─┐              ┌─ 21 / 2 ─▶ its loss
    microbatch 1   sum of weights  1 ─┴─ total 21 ───┴─ 21 / 2 ─▶ its loss
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.errors import TraceError
from shardwright.tensorflow.loss_reduction import Kind, piece_of
from shardwright.tensorflow.step_graph import StepGraph
from shardwright.tensorflow.trace import Trace


class Divisors:
    """The divisors of a microbatch, computed from its arguments alone."""

    def __init__(self, graph: StepGraph, trace: Trace, kinds: Mapping[str, Kind]):
        self.kinds = kinds
        self._arguments = graph.arguments[: len(graph.arguments) - len(kinds)]
        makers = graph.makers()
        if missing := kinds.keys() - makers.keys():
            raise TraceError(
                f"the step divides a loss by {sorted(missing)[0]}, which it does not make for a batch of "
                "this shape, so microbatches cannot be weighed alike. Set microbatches to 1."
            )
        body: set[str] = set()
        feeds: set[str] = set()
        pending = list(kinds)
        while pending:
            tensor = pending.pop()
            if tensor in self._arguments:
                feeds.add(tensor)
            elif makers[tensor].name not in body:
                body.add(makers[tensor].name)
                pending += makers[tensor].inputs
        self._piece = piece_of(trace, body, sorted(feeds), list(kinds))

    def of(self, part: Sequence[Any]) -> list[Any]:
        """The divisors of a microbatch by itself."""
        given = dict(zip(self._arguments, part, strict=True))
        made = self._piece.run([given[name] for name in self._piece.feeds])
        return [each.numpy() for each in made[: len(self.kinds)]]


def with_shares(
    each: Sequence[Divisors],
    parts: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    total_of: Callable[[Sequence[float]], Sequence[float]],
) -> list[list[Any]]:
    """The arguments of microbatches, and behind them their shares of the divisors of the batch."""
    found = [divisors.of(part) for divisors, part in zip(each, parts, strict=True)]
    kinds = list(each[0].kinds.values())
    sums = [
        sum(
            one[at] * np.float64(1 if kind == "sum" else size) for one, size in zip(found, sizes, strict=True)
        )
        for at, kind in enumerate(kinds)
    ]
    flat = total_of([float(sum(sizes)), *np.concatenate([np.ravel(total) for total in sums])])
    samples, totals = flat[0], np.split(np.array(flat[1:]), np.cumsum([np.size(t) for t in sums])[:-1])
    made = []
    for part, size in zip(parts, sizes, strict=True):
        shares = [
            tf.constant((total * (size if kind == "sum" else 1) / samples).reshape(like.shape), like.dtype)
            for total, kind, like in zip(totals, kinds, found[0], strict=True)
        ]
        made.append([*part, *shares])
    return made

"""Prices ways to train, in seconds and bytes, for a transformer or a chain of layers.

Millions of ways are priced block by block: what the formulas have in their hands then stays in the caches
of a core.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs import (
    Offload,
    Options,
    Prices,
    RankBytes,
    Rates,
    Recompute,
    chain_prices,
    rank_bytes,
    transformer_fit,
    transformer_prices,
)
from shardwright.planner.ways.task import Task

_ROWS_OF_BLOCK = 2**14
"""A column of so many numbers takes 128 KiB."""


def prices_of(task: Task, ways: Options, *, faster: Mapping[str, float] = MappingProxyType({})) -> Prices:
    """Seconds and bytes of every way; `faster`: rates of the machines so many times as high."""
    kind = replace(task.kind, rates=_raised(task.rates, faster))
    if isinstance(task.model, LayerChain):
        return chain_prices(task.model, ways, [kind], kind.rates, precision=task.precision, width=task.width)
    return Prices.together(
        [transformer_prices(task.shape, block, kind, precision=task.precision) for block in _blocks(ways)]
    )


def memory_of(task: Task, ways: Options) -> tuple[RankBytes, Any]:
    """Memory of the neediest rank of every way, which is that closest to its limit; and that limit."""
    if isinstance(task.model, LayerChain):
        found = prices_of(task, ways)
        return found.num_bytes, found.limit
    blocks = [rank_bytes(task.shape, each, precision=task.precision) for each in _blocks(ways)]
    return RankBytes.together(blocks), float(task.memory_bytes)


def fits(task: Task, ways: Options) -> NDArray[np.bool_]:
    """Whether ways fit in the memory of accelerators, and what they offload in that of hosts."""
    if isinstance(task.model, LayerChain):
        num_bytes, limit = memory_of(task, ways)
        found = np.atleast_1d(num_bytes.total <= limit)
    else:
        found = np.concatenate(
            [
                np.atleast_1d(transformer_fit(task.shape, block, task.kind, precision=task.precision))
                for block in _blocks(ways)
            ]
        )
    offload = np.broadcast_to(ways.offload, found.shape)
    on_host = np.flatnonzero(found & (offload != Offload.NOTHING))
    if task.host_bytes and len(on_host):
        found[on_host] = memory_of(task, ways.take(on_host))[0].host <= task.host_bytes
    return found


def with_least_recomputation(task: Task, ways: Options, *, share: float = 1.0) -> Options:
    """Ways that fit, with as many `kept_layers` as a share of the memory has room for.

    Memory grows by as much with each block that keeps its activations, or by more where another rank
    becomes the neediest: what is worked out from the two ends fits in between.
    """
    if isinstance(task.model, LayerChain) or {"recompute", "kept_layers"} & set(task.pins):
        return ways
    # Of what goes to the host, more would be in the way there.
    chosen = np.flatnonzero((ways.recompute == Recompute.FULL) & (ways.offload != Offload.ACTIVATIONS))
    if not len(chosen):
        return ways
    some = ways.take(chosen)
    all_kept = np.floor(task.layers / some.pipeline)

    def free(kept: NDArray[np.float64]) -> NDArray[np.float64]:
        """Bytes that the neediest ranks leave of a share of the memory."""
        num_bytes, limit = memory_of(task, replace(some, kept_layers=kept))
        return np.asarray(share * limit - num_bytes.total)

    none_free, all_free = free(all_kept), free(0 * all_kept)
    kept = np.clip(np.floor(all_kept * all_free / np.maximum(all_free - none_free, 1.0)), 0.0, all_kept)
    kept = np.where(fits(task, replace(some, kept_layers=kept)), kept, 0.0)
    found = np.array(np.broadcast_to(ways.kept_layers, ways.pipeline.shape), dtype=float)
    found[chosen] = kept
    return replace(ways, kept_layers=found)


def _raised(rates: Rates, faster: Mapping[str, float]) -> Rates:
    return replace(rates, **{name: getattr(rates, name) * factor for name, factor in faster.items()})


def _blocks(ways: Options) -> Iterator[Options]:
    """Ways as columns, some thousands at a time; what is one number stays so."""
    number = len(np.atleast_1d(ways.pipeline))
    if number <= _ROWS_OF_BLOCK:
        yield ways
        return
    for start in range(0, number, _ROWS_OF_BLOCK):
        yield ways.take(slice(start, start + _ROWS_OF_BLOCK))

"""Prices ways to train, in seconds and bytes, for a transformer or a chain of layers.

Millions of ways of a transformer are priced block by block: what the formulas have in their hands then stays
in the caches of a core.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs import (
    MixedPrices,
    Offload,
    Options,
    RankBytes,
    Rates,
    StepSeconds,
    chain_bytes,
    chain_seconds,
    mixed_chain,
    mixed_fit,
    mixed_prices,
    rank_bytes,
    step_seconds,
)
from shardwright.topology.task import Task

__all__ = ["bytes_of", "fits", "memory_of", "mixed_of", "seconds_of"]

_Prices = TypeVar("_Prices", StepSeconds, RankBytes)

_ROWS_OF_BLOCK = 2**14
"""A column of so many numbers takes 128 KiB."""


def seconds_of(
    task: Task, ways: Options, *, faster: Mapping[str, float] = MappingProxyType({})
) -> StepSeconds:
    """Seconds of a step of every way."""
    if task.kinds:
        return mixed_of(task, ways, faster=faster).seconds
    rates, reached = _raised(task.rates, faster), task.calibration.efficiencies
    if isinstance(task.model, LayerChain):
        return chain_seconds(task.model, ways, rates, reached, width=task.width)
    return _together([step_seconds(task.shape, block, rates, reached) for block in _blocks(ways)])


def bytes_of(task: Task, ways: Options) -> RankBytes:
    """Memory of the neediest rank of every way: on nodes of several kinds, that is closest to its limit."""
    return memory_of(task, ways)[0]


def memory_of(task: Task, ways: Options) -> tuple[RankBytes, NDArray[np.float64]]:
    """The `bytes_of` every way, and bytes that this rank may use."""
    if task.kinds:
        mixed = mixed_of(task, ways)
        return mixed.num_bytes, mixed.limit
    limit = np.asarray(float(task.memory_bytes))
    if isinstance(task.model, LayerChain):
        found = chain_bytes(task.model, ways, precision=task.precision, width=task.width)
        return found, limit
    apart, place = _apart_in_memory(ways)
    found = _together([rank_bytes(task.shape, each, precision=task.precision) for each in _blocks(apart)])
    return found if place is None else found.take(place), limit


def mixed_of(task: Task, ways: Options, *, faster: Mapping[str, float] = MappingProxyType({})) -> MixedPrices:
    """Seconds and bytes on nodes of several kinds, with the layers that each kind takes."""
    kinds = [replace(kind, rates=_raised(kind.rates, faster)) for kind in task.kinds]
    between = _raised(task.rates, faster)
    if isinstance(task.model, LayerChain):
        return mixed_chain(
            task.model,
            ways,
            kinds,
            between,
            precision=task.precision,
            width=task.width,
        )
    return mixed_prices(task.shape, ways, kinds, between, precision=task.precision)


def _raised(rates: Rates, faster: Mapping[str, float]) -> Rates:
    return replace(rates, **{name: getattr(rates, name) * factor for name, factor in faster.items()})


def fits(task: Task, ways: Options) -> NDArray[np.bool_]:
    """Whether ways fit in the memory of accelerators."""
    if isinstance(task.model, LayerChain):
        num_bytes, limit = memory_of(task, ways)
        found = np.atleast_1d(num_bytes.total <= limit)
    elif task.kinds:
        found = mixed_fit(task.shape, ways, task.kinds, precision=task.precision)
    else:
        shape, precision = task.shape, task.precision
        apart, place = _apart_in_memory(ways)
        totals = (rank_bytes(shape, block, precision=precision).total for block in _blocks(apart))
        found = np.concatenate([np.atleast_1d(total <= task.memory_bytes) for total in totals])
        found = found if place is None else found[place]
    offload = np.broadcast_to(ways.offload, found.shape)
    on_host = np.flatnonzero(found & (offload != Offload.NOTHING))
    if task.host_bytes and len(on_host):
        found[on_host] = bytes_of(task, ways.take(on_host)).host <= task.host_bytes
    return found


def _apart_in_memory(ways: Options) -> tuple[Options, NDArray[np.intp] | None]:
    """Ways without those that differ from the one before in the order of ranks alone: these take as much.

    Returns these, and for each of all ways its place among them; None where that is its own.
    """
    if not np.ndim(ways.placement) or len(ways.placement) < 2:
        return ways, None
    columns = [getattr(ways, name) for name in Options.names() if name != "placement"]
    same = np.ones(len(ways.placement) - 1, dtype=bool)
    for column in columns:
        if np.ndim(column) and column.strides[0]:
            same &= column[1:] == column[:-1]
    if not same.any():
        return ways, None
    first = np.concatenate([[True], ~same])
    return ways.take(np.flatnonzero(first)), np.cumsum(first) - 1


def _blocks(ways: Options) -> Iterator[Options]:
    """Ways as columns, some thousands at a time; what is one number stays so."""
    columns = {name: getattr(ways, name) for name in Options.names()}
    number = max(len(column) if np.ndim(column) else 1 for column in columns.values())
    if number <= _ROWS_OF_BLOCK:
        yield ways
        return
    for start in range(0, number, _ROWS_OF_BLOCK):
        rows = slice(start, start + _ROWS_OF_BLOCK)
        yield Options(**{name: c[rows] if np.ndim(c) else c for name, c in columns.items()})


def _together(blocks: list[_Prices]) -> _Prices:
    """The prices of all blocks; what does not depend on the ways is one number in each of them."""
    first = blocks[0]
    if len(blocks) == 1:
        return first
    columns = {field.name: [getattr(block, field.name) for block in blocks] for field in fields(first)}
    return type(first)(
        **{name: np.concatenate(parts) if np.ndim(parts[0]) else parts[0] for name, parts in columns.items()}
    )

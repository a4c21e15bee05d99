"""Prices ways to train, in seconds and bytes, for a transformer or a chain of layers."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

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


def seconds_of(
    task: Task, ways: Options, *, faster: Mapping[str, float] = MappingProxyType({})
) -> StepSeconds:
    """Seconds of a step of every way.

    Args:
        task: what is asked for.
        ways: options, numbers or columns.
        faster: factors by which rates of the machines are raised, by their names in `Rates`.
    """
    if task.kinds:
        return mixed_of(task, ways, faster=faster).seconds
    rates, reached = _raised(task.rates, faster), task.calibration.efficiencies
    if isinstance(task.model, LayerChain):
        return chain_seconds(task.model, ways, rates, reached, width=task.width)
    return step_seconds(task.shape, ways, rates, reached)


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
    return rank_bytes(task.shape, ways, precision=task.precision), limit


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
    """Whether ways fit in the memory of accelerators, and what they offload in that of hosts, if it is known.

    Args:
        task: what is asked for.
        ways: options as columns.
    """
    if task.kinds and not isinstance(task.model, LayerChain):
        found = mixed_fit(task.shape, ways, task.kinds, precision=task.precision)
    else:
        num_bytes, limit = memory_of(task, ways)
        found = np.atleast_1d(num_bytes.total <= limit)
    offload = np.broadcast_to(ways.offload, found.shape)
    on_host = np.flatnonzero(found & (offload != Offload.NOTHING))
    if task.host_bytes and len(on_host):
        found[on_host] = bytes_of(task, ways.take(on_host)).host <= task.host_bytes
    return found

"""Seconds and bytes of ways to train, whatever the model is: a transformer, or a chain of layers."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs import (
    Offload,
    Options,
    RankBytes,
    Rates,
    StepSeconds,
    chain_bytes,
    chain_seconds,
    rank_bytes,
    step_seconds,
)
from shardwright.topology.task import Task

__all__ = ["bytes_of", "fits", "seconds_of"]


def seconds_of(task: Task, ways: Options, *, rates: Rates | None = None) -> StepSeconds:
    """Seconds of a step of every way.

    Args:
        task: what is asked for.
        ways: options, numbers or columns.
        rates: of the machines; None: those of the task.
    """
    rates, reached = rates or task.rates, task.calibration.efficiencies
    if isinstance(task.model, LayerChain):
        return chain_seconds(task.model, ways, rates, reached, width=task.width)
    return step_seconds(task.shape, ways, rates, reached)


def bytes_of(task: Task, ways: Options) -> RankBytes:
    """Memory of the neediest rank of every way."""
    if isinstance(task.model, LayerChain):
        return chain_bytes(task.model, ways, precision=task.precision, base=task.base_bytes, width=task.width)
    return rank_bytes(task.shape, ways, precision=task.precision, base=task.base_bytes)


def fits(task: Task, ways: Options, needed: NDArray[np.float64] | None = None) -> NDArray[np.bool_]:
    """Whether ways fit in the memory of accelerators, and what they offload in that of hosts, if it is known.

    Args:
        task: what is asked for.
        ways: options as columns.
        needed: their `bytes_of`, where that is known.
    """
    needed = np.asarray(bytes_of(task, ways).total) if needed is None else needed
    found: NDArray[np.bool_] = np.atleast_1d(needed <= task.memory_bytes)
    offload = np.broadcast_to(ways.offload, found.shape)
    on_host = np.flatnonzero(found & (offload != Offload.NOTHING))
    if task.host_bytes and len(on_host):
        there = ways.take(on_host)
        kept = (
            bytes_of(task, replace(there, offload=np.zeros(len(on_host)))).total - bytes_of(task, there).total
        )
        found[on_host] = kept <= task.host_bytes
    return found

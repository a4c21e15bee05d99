"""Seconds and bytes of ways to train, whatever the model is: a transformer, or a chain of layers."""

from shardwright.catalogue import LayerChain
from shardwright.costs import (
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

__all__ = ["bytes_of", "seconds_of"]


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

"""Recomputes as few blocks in full as memory allows; the others keep their activations."""

from dataclasses import replace

import numpy as np

from shardwright.catalogue import LayerChain
from shardwright.costs import Offload, Options, Recompute
from shardwright.topology.pricing import fits, memory_of
from shardwright.topology.task import Task

__all__ = ["with_least_recomputation"]


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
    none_free, all_free = (
        _free(task, replace(some, kept_layers=kept), share) for kept in (all_kept, 0 * all_kept)
    )
    kept = np.clip(np.floor(all_kept * all_free / np.maximum(all_free - none_free, 1.0)), 0.0, all_kept)
    kept = np.where(fits(task, replace(some, kept_layers=kept)), kept, 0.0)
    found = np.array(np.broadcast_to(ways.kept_layers, ways.pipeline.shape), dtype=float)
    found[chosen] = kept
    return replace(ways, kept_layers=found)


def _free(task: Task, ways: Options, share: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Bytes that the neediest ranks leave of a share of the memory."""
    num_bytes, limit = memory_of(task, ways)
    found: np.ndarray[tuple[int], np.dtype[np.float64]] = share * limit - num_bytes.total
    return found

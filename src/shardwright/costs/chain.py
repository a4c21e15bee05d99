"""Seconds and bytes of a training step of a chain of layers, for many candidates at once.

A layer of a microbatch of b samples takes, forward::

    kernels + b * FLOPs / (peak * efficiency) + (b * numbers moved + parameters) * width / bandwidth

and twice as much backward, half of it for gradients of weights. Stages are consecutive layers: for every
number of stages, those whose slowest is fastest.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs.efficiencies import Efficiencies
from shardwright.costs.inputs import Numbers, Offload, Options, Rates, Recompute, ScheduleKind
from shardwright.costs.links import hop_seconds
from shardwright.costs.memory import Precision, RankBytes, buckets_bytes, in_flight, state_bytes
from shardwright.costs.step import (
    StepSeconds,
    all_reduce_seconds,
    bubble_seconds,
    shard_seconds,
    update_seconds,
)

__all__ = ["chain_bytes", "chain_seconds", "stage_ends"]

_KERNELS = 4  # of a layer's forward: a product or convolution, a normalisation, an activation, an addition
_BISECTIONS = 50

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Group:
    """Candidates that cut the chain alike.

    Attributes:
        chosen: their numbers.
        options: of them.
        ends: for each stage, the layer behind its last.
        ranks: for each stage, its pipeline rank.
    """

    chosen: NDArray[np.intp]
    options: Options
    ends: tuple[int, ...]
    ranks: tuple[int, ...]

    def of_ranks(self, of_layers: Floats) -> Floats:
        """Sums over the layers of each pipeline rank: (..., layers) to (..., ranks)."""
        sums = np.concatenate([np.zeros((*of_layers.shape[:-1], 1)), np.cumsum(of_layers, axis=-1)], axis=-1)
        starts = (0, *self.ends[:-1])
        stages = sums[..., list(self.ends)] - sums[..., list(starts)]
        found = np.zeros((*of_layers.shape[:-1], max(self.ranks) + 1))
        for stage, rank in enumerate(self.ranks):
            found[..., rank] += stages[..., stage]
        return found


def chain_seconds(
    chain: LayerChain, options: Options, rates: Rates, reached: Efficiencies, *, width: int
) -> StepSeconds:
    """Seconds of a step of every candidate.

    Args:
        chain: the model.
        options: the candidates; only pipelines, replicas, shards, microbatches, recomputation and offload.
        rates: of the machines.
        reached: shares of them.
        width: bytes of a number.
    """
    found: StepSeconds = _by_group(
        chain, options, lambda group: _seconds_of(chain, group, rates, reached, width), StepSeconds
    )
    return found


def chain_bytes(
    chain: LayerChain, options: Options, *, precision: Precision, base: float, width: int
) -> RankBytes:
    """Memory of the neediest rank of every candidate.

    Args:
        chain: the model.
        options: the candidates.
        precision: of parameters and updates.
        base: bytes that are taken before the model is there.
        width: bytes of a number.
    """
    found: RankBytes = _by_group(
        chain, options, lambda group: _bytes_of(chain, group, precision, base, width), RankBytes
    )
    return found


@lru_cache(maxsize=4096)
def stage_ends(weights: tuple[float, ...], stages: int) -> tuple[int, ...]:
    """Cuts layers into so many stages, none empty, so that the heaviest is as light as can be.

    Returns:
        For each stage, the layer behind its last.

    >>> stage_ends((3.0, 1.0, 1.0, 1.0, 2.0), 2)
    (2, 5)
    """
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    low, high = max(max(weights), float(sums[-1]) / stages), float(sums[-1])
    best = _filled(sums, stages, high)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        found = _filled(sums, stages, middle)
        if found is None:
            low = middle
        else:
            best, high = found, middle
    assert best is not None
    return best


def _filled(sums: Floats, stages: int, most: float) -> tuple[int, ...] | None:
    """Stages of at most so much, filled one after the other; None where they are too few."""
    layers, ends, start = len(sums) - 1, [], 0
    for stage in range(stages):
        left = stages - stage - 1
        end = int(np.searchsorted(sums, sums[start] + most * (1 + 1e-12), side="right")) - 1
        end = min(max(end, start + 1), layers - left)
        if sums[end] - sums[start] > most * (1 + 1e-9):
            return None
        ends.append(end)
        start = end
    return tuple(ends) if start == layers else None


def _by_group(chain: LayerChain, options: Options, price: Any, kind: Any) -> Any:
    number = np.broadcast(*(getattr(options, name) for name in options.names())).size
    is_one = all(np.ndim(getattr(options, name)) == 0 for name in options.names())
    columns = {name: np.zeros(number) for name in kind.__dataclass_fields__}
    for group in _groups(chain, options, number):
        found = price(group)
        for name, column in columns.items():
            column[group.chosen] = getattr(found, name)
    return kind(**{name: column[0] if is_one else column for name, column in columns.items()})


def _groups(chain: LayerChain, options: Options, number: int) -> Iterator[_Group]:
    """Candidates by what cuts the chain: stages, their order, and what a backward computes again."""
    keys = np.stack(
        [
            np.broadcast_to(np.asarray(getattr(options, name), dtype=float), (number,))
            for name in ("pipeline", "virtual", "recompute", "schedule")
        ]
    )
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    flat = Options(**{name: np.broadcast_to(getattr(options, name), (number,)) for name in options.names()})
    for column in range(distinct.shape[1]):
        pipeline, virtual, again, schedule = (int(value) for value in distinct[:, column])
        chosen = np.flatnonzero(which.ravel() == column)
        stages = pipeline * virtual
        forwards = 4.0 if again == Recompute.FULL else 3.0
        weights = tuple(forwards * layer.flops + layer.moved for layer in chain.layers)
        yield _Group(
            chosen,
            flat.take(chosen),
            stage_ends(weights, stages),
            tuple(_rank_of(stage, pipeline, schedule) for stage in range(stages)),
        )


def _rank_of(stage: int, pipeline: int, schedule: int) -> int:
    if schedule == ScheduleKind.ZB_V and stage >= pipeline:
        return 2 * pipeline - 1 - stage
    return stage % pipeline


def _seconds_of(
    chain: LayerChain, group: _Group, rates: Rates, reached: Efficiencies, width: int
) -> StepSeconds:
    o = group.options
    p, m = o.pipeline, o.microbatches
    flops, moved, parameters = (np.array(chain.column(name)) for name in ("flops", "moved", "parameters"))
    samples = np.asarray(o.microbatch)[:, None]
    memory_Bps = rates.memory_Bps * min(reached.memory, 1.0)
    flops_per_s = rates.flops_per_s * min(reached.matmul * reached.matmul_factor, 1.0)
    forward = group.of_ranks(
        _KERNELS * reached.kernel_s
        + samples * flops / flops_per_s
        + (samples * moved + parameters) * width / memory_Bps
    )
    weight = group.of_ranks(samples * flops / flops_per_s).mean(axis=1)
    again = np.where(np.asarray(o.recompute) == Recompute.FULL, 1.0, 0.0)
    mean, slowest = forward.mean(axis=1), forward.max(axis=1)
    works = 3 + again
    held = group.of_ranks(parameters).max()
    crossing = _crossing(chain, group)
    hop = _hop_seconds(o, crossing * width, rates, reached)
    # Sums over replicas begin in the last backward.
    sums, behind = all_reduce_seconds(held, o, rates, reached), reached.overlap * 2 * mean
    gather, scatter = shard_seconds(held * np.ones_like(mean), o, rates, reached, works * mean)
    return StepSeconds(
        compute=m * 3 * mean,
        recompute=m * again * mean,
        imbalance=m * works * (slowest - mean),
        tensor=0.0,
        context=0.0,
        expert=0.0,
        bubble=bubble_seconds(o, mean=works * mean, weight=weight, hop=hop),
        point_to_point=m * hop,
        gather=gather,
        reduce_scatter=scatter,
        all_reduce=np.hypot(sums, behind) - behind,
        update=update_seconds(held, o, rates, reached),
        offload=m * _offload_seconds(chain, group, rates, reached, works * mean, width),
        overhead=reached.step_s + m * (reached.microbatch_s + len(chain.layers) / p * reached.layer_s),
    )


def _crossing(chain: LayerChain, group: _Group) -> float:
    """Numbers of a sample that cross the widest cut."""
    cuts = [end - 1 for end in group.ends[:-1]]
    return max((chain.layers[cut].crossing for cut in cuts), default=0.0)


def _hop_seconds(options: Options, num_bytes: float, rates: Rates, reached: Efficiencies) -> Numbers:
    near = options.pipeline_span <= rates.per_node
    once = hop_seconds(rates, options.microbatch * num_bytes, share=reached.point_to_point, near=near)
    kind = options.schedule
    crossings = np.where(kind == ScheduleKind.INTERLEAVED, options.virtual, 1.0)
    crossings = np.where(kind == ScheduleKind.ZB_V, 2.0, crossings)
    return np.where(options.pipeline > 1, 2 * crossings * once, 0.0)


def _kept(chain: LayerChain, group: _Group) -> Floats:
    """Numbers that the layers of each pipeline rank keep of a sample: (ranks,)."""
    full = np.asarray(group.options.recompute)[0] == Recompute.FULL
    return group.of_ranks(np.array(chain.column("inputs" if full else "kept")))


def _offload_seconds(
    chain: LayerChain, group: _Group, rates: Rates, reached: Efficiencies, computing: Floats, width: int
) -> Numbers:
    """What is kept goes to the host and comes back, behind the computing that hides nothing else."""
    o = group.options
    once = 2 * o.microbatch * _kept(chain, group).max() * width / np.maximum(rates.host_Bps, 1.0)
    beyond = np.maximum(0.0, once - np.maximum(0.0, 1 - reached.overlap) * computing)
    return np.where(o.offload == Offload.ACTIVATIONS, beyond, 0.0)


def _bytes_of(chain: LayerChain, group: _Group, precision: Precision, base: float, width: int) -> RankBytes:
    """Of the neediest rank: all ranks are worked out."""
    o = group.options
    parameters = group.of_ranks(np.array(chain.column("parameters"), dtype=float))
    kept = _kept(chain, group)
    layers = chain.layers
    whole = np.where(
        np.asarray(o.recompute) == Recompute.FULL, max(layer.kept for layer in layers) * width, 0.0
    )
    largest = max(layer.parameters for layer in layers) * (2 * precision.weight + precision.gradient)
    best: RankBytes | None = None
    for rank in range(len(parameters)):
        weights, gradients, states = state_bytes(parameters[rank], o, precision)
        activations = kept[rank] * width * np.asarray(o.microbatch) * _in_flight(o, rank)
        found = RankBytes(
            parameters=weights,
            gradients=gradients,
            optimizer=states,
            activations=np.where(o.offload == Offload.ACTIVATIONS, 0.0, activations),
            gathered=np.where(o.sharded >= 3, largest, 0.0),
            work=whole * np.asarray(o.microbatch),
            communication=buckets_bytes(o),
            base=base,
        )
        best = found if best is None else _needier(best, found)
    assert best is not None
    return best


def _in_flight(options: Options, rank: int) -> Numbers:
    """Microbatches whose activations a pipeline rank keeps: of 1F1B, one fewer on each rank."""
    flight = in_flight(options)
    one_by_one = (options.schedule == ScheduleKind.ONE_F_ONE_B) | (options.schedule == ScheduleKind.ZB_H1)
    later = np.minimum(flight, np.maximum(options.pipeline - rank, 1.0))
    return np.where(options.pipeline > 1, np.where(one_by_one, later, flight), 1.0)


def _needier(a: RankBytes, b: RankBytes) -> RankBytes:
    more = np.asarray(b.total) > np.asarray(a.total)
    names = RankBytes.__dataclass_fields__
    return RankBytes(**{name: np.where(more, getattr(b, name), getattr(a, name)) for name in names})

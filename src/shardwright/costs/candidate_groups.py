"""Candidates that cut a chain of layers alike, and how they cut it.

Stages are consecutive layers: for every number of stages, the cuts whose slowest stage is fastest, on the
nodes that each stage occupies.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs.efficiencies import Efficiencies
from shardwright.costs.inputs import Options, Placement, Recompute, ScheduleKind
from shardwright.costs.kinds import KindOfRank, stages_alike
from shardwright.costs.partition import split

__all__ = ["Group", "by_group", "flops_per_s", "flops_share", "stage_ends"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Group:
    """Candidates that cut the chain alike.

    Attributes:
        ends: for each stage, the layer behind its last.
        ranks: for each stage, its pipeline rank.
        kinds: for each pipeline rank, the kinds of nodes that it lies on; empty where they do not count.
    """

    chosen: NDArray[np.intp]
    options: Options
    ends: tuple[int, ...]
    ranks: tuple[int, ...]
    kinds: tuple[tuple[KindOfRank, ...], ...]

    def slowest(self, rate: Callable[[KindOfRank], float]) -> Floats:
        """The least of a rate on the nodes of each pipeline rank; 0 where they do not count."""
        return np.array([min(map(rate, kinds), default=0.0) for kinds in self.kinds])

    def of_ranks(self, of_layers: Floats) -> Floats:
        """Sums over the layers of each pipeline rank: (..., layers) to (..., ranks)."""
        sums = np.concatenate([np.zeros((*of_layers.shape[:-1], 1)), np.cumsum(of_layers, axis=-1)], axis=-1)
        starts = (0, *self.ends[:-1])
        stages = sums[..., list(self.ends)] - sums[..., list(starts)]
        found = np.zeros((*of_layers.shape[:-1], max(self.ranks) + 1))
        for stage, rank in enumerate(self.ranks):
            found[..., rank] += stages[..., stage]
        return found


@lru_cache(maxsize=4096)
def stage_ends(
    weights: tuple[float, ...], stages: int, speeds: tuple[float, ...] | None = None
) -> tuple[int, ...]:
    """Cuts layers into so many stages, none empty, so that the one that takes longest is as fast as can be.

    >>> stage_ends((3.0, 1.0, 1.0, 1.0, 2.0), 2)
    (2, 5)
    >>> stage_ends((3.0, 1.0, 1.0, 1.0, 2.0), 2, (3.0, 1.0))
    (4, 5)
    """
    sums = np.concatenate([[0.0], np.cumsum(weights)])
    work = np.where(np.tri(len(sums), dtype=bool), np.inf, sums[None, :] - sums[:, None])
    of_speed = {speed: work / speed for speed in set(speeds or (1.0,))}
    cuts = split(
        len(weights),
        num_stages=stages,
        cost_of_stage=lambda stage: of_speed[speeds[stage] if speeds else 1.0],
    )
    assert cuts is not None  # nothing is forbidden
    return cuts[1:]


def by_group(chain: LayerChain, options: Options, kinds: Sequence[KindOfRank], price: Any, kind: Any) -> Any:
    """Prices each group of candidates at once."""
    number = np.broadcast(*(getattr(options, name) for name in options.names())).size
    is_one = all(np.ndim(getattr(options, name)) == 0 for name in options.names())
    columns = {name: np.zeros(number) for name in kind.__dataclass_fields__}
    for group in _groups(chain, options, kinds, number):
        found = price(group)
        for name, column in columns.items():
            column[group.chosen] = getattr(found, name)
    return kind(**{name: column[0] if is_one else column for name, column in columns.items()})


def _groups(chain: LayerChain, options: Options, kinds: Sequence[KindOfRank], number: int) -> Iterator[Group]:
    """Candidates by what cuts the chain: stages, their order and nodes, what a backward computes again."""
    keys = np.stack(
        [
            np.broadcast_to(np.asarray(getattr(options, name), dtype=float), (number,))
            for name in ("pipeline", "virtual", "recompute", "schedule", "placement")
        ]
    )
    distinct, which = np.unique(keys, axis=1, return_inverse=True)
    flat = Options(**{name: np.broadcast_to(getattr(options, name), (number,)) for name in options.names()})
    for column in range(distinct.shape[1]):
        pipeline, virtual, again, schedule, placement = (int(value) for value in distinct[:, column])
        chosen = np.flatnonzero(which.ravel() == column)
        stages = pipeline * virtual
        forwards = 4.0 if again == Recompute.FULL else 3.0
        weights = tuple(forwards * layer.flops + layer.moved for layer in chain.layers)
        ranks = tuple(_rank_of(stage, pipeline, schedule) for stage in range(stages))
        of_ranks = _kinds_of_ranks(kinds, pipeline, placement)
        speeds = None
        if len(kinds) > 1:
            of_each = [min(map(flops_per_s, there)) for there in of_ranks]
            speeds = tuple(of_each[rank] / min(of_each) for rank in ranks)
        yield Group(chosen, flat.take(chosen), stage_ends(weights, stages, speeds), ranks, of_ranks)


def _kinds_of_ranks(
    kinds: Sequence[KindOfRank], pipeline: int, placement: int
) -> tuple[tuple[KindOfRank, ...], ...]:
    if len(kinds) <= 1:
        return (tuple(kinds),) * pipeline
    apart = pipeline > 1 and placement == Placement.PDT
    alike = stages_alike([kind.ranks for kind in kinds], pipeline, apart=apart)
    return tuple(tuple(kinds[k] for k in each.kinds) for each in alike for _ in range(each.stages))


def flops_per_s(kind: KindOfRank) -> float:
    """FLOPs of matrix products that a node reaches in a second."""
    return float(kind.rates.flops_per_s * flops_share(kind.reached))


def flops_share(reached: Efficiencies) -> float:
    """The share of a device's peak that matrix products reach."""
    return float(min(reached.matmul * reached.matmul_factor, 1.0))


def _rank_of(stage: int, pipeline: int, schedule: int) -> int:
    if schedule == ScheduleKind.ZB_V and stage >= pipeline:
        return 2 * pipeline - 1 - stage
    return stage % pipeline

"""Kinds of ranks on which a step is priced, its prices, and those of a transformer on one kind."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.calibration import Efficiencies
from shardwright.costs.inputs import Columns, Numbers, Options, Rates
from shardwright.costs.memory import BF16, Precision, RankBytes, rank_bytes
from shardwright.costs.shape import Shape
from shardwright.costs.step import StepSeconds, step_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class KindOfRank:
    """Ranks of one kind of node.

    Attributes:
        rates: of such nodes among themselves.
    """

    ranks: int
    rates: Rates
    reached: Efficiencies
    memory_bytes: float


@dataclass(frozen=True, slots=True)
class _StagesAlike:
    """Neighbouring pipeline ranks on the same kinds of nodes.

    Attributes:
        last: it is the pipeline rank with the head, which is always apart.
    """

    kinds: tuple[int, ...]
    stages: int
    last: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices(Columns):
    """The prices of ways.

    Attributes:
        num_bytes: of the rank that is closest to its limit, or furthest beyond it.
    """

    seconds: StepSeconds
    num_bytes: RankBytes
    limit: Numbers


def stages_alike(ranks: Sequence[int], pipeline: int, *, apart: bool) -> list[_StagesAlike]:
    """Groups the stages of a pipeline by the kinds of nodes that they lie on.

    >>> [(each.kinds, each.stages) for each in stages_alike([8, 4], 6, apart=True)]
    [((0,), 4), ((1,), 1), ((1,), 1)]
    """
    ends = np.cumsum(ranks)
    total = int(ends[-1])
    found: list[_StagesAlike] = []
    for stage in range(pipeline):
        first, behind = stage * total // pipeline, (stage + 1) * total // pipeline
        kinds = tuple(
            kind
            for kind, end in enumerate(ends.tolist())
            if not apart or (first < end and behind > end - ranks[kind])
        )
        last = stage == pipeline - 1
        if found and found[-1].kinds == kinds and not last:
            found[-1] = replace(found[-1], stages=found[-1].stages + 1)
        else:
            found.append(_StagesAlike(kinds, 1, last))
    return found


def rates_among(kinds: Sequence[KindOfRank], between: Rates) -> Rates:
    """Rates where each stage lies on one kind of node: messages go between kinds, but no sums do."""
    slowest = min(float(kind.rates.network_Bps) for kind in kinds)
    return replace(between, network_Bps=slowest, hop_Bps=between.hop_Bps or between.network_Bps)


def transformer_prices(
    shape: Shape, options: Options, kind: KindOfRank, *, precision: Precision = BF16
) -> Prices:
    return Prices(
        seconds=step_seconds(shape, options, kind.rates, kind.reached),
        num_bytes=rank_bytes(shape, options, precision=precision),
        limit=kind.memory_bytes,
    )


def transformer_fit(
    shape: Shape, options: Options, kind: KindOfRank, *, precision: Precision = BF16
) -> NDArray[np.bool_]:
    """Whether candidates fit in memory; the same as of `transformer_prices`, without the seconds."""
    fit = rank_bytes(shape, options, precision=precision).total <= kind.memory_bytes
    return np.asarray(fit, dtype=bool)

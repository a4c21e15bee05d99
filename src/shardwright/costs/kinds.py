"""Nodes of several kinds: stages on faster nodes take more blocks, as far as memory allows.

Where pipelines span nodes (placement PDT), a stage occupies neighbouring ranks, and so nodes of one kind, or
of two where kinds meet. Blocks are dealt so that the slowest stage is as fast as possible::

    least T with  sum over stages of min(floor(T / t), cap) >= blocks

for t seconds per block, including its share of the reduction over replicas and of the update, and at most cap
blocks in memory. Where a stage occupies several kinds, as all do where replicas span nodes, the slowest
counts, because its replicas wait for one another.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.costs.block import BlockSeconds, block_seconds, head_seconds
from shardwright.costs.calibration import Efficiencies
from shardwright.costs.inputs import Columns, Numbers, Options, Placement, Rates
from shardwright.costs.memory import BF16, Precision, RankBytes, needier, rank_bytes, stage_bytes
from shardwright.costs.shape import Shape
from shardwright.costs.step import (
    StepSeconds,
    all_reduce_seconds,
    rank_parameters,
    step_of_stages,
    step_seconds,
    update_seconds,
    updated_parameters,
)

_BISECTIONS = 30
_ROUNDING = 1e-9

Floats = NDArray[np.float64]


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
        blocks: of the pipeline ranks of each kind of node, at most: (kinds, ways); 0 where a kind has none.
    """

    seconds: StepSeconds
    num_bytes: RankBytes
    limit: Numbers
    blocks: Numbers = 0.0


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
    shape: Shape,
    options: Options,
    kinds: Sequence[KindOfRank],
    between: Rates,
    *,
    precision: Precision = BF16,
) -> Prices:
    if len(kinds) == 1:
        return Prices(
            seconds=step_seconds(shape, options, kinds[0].rates, kinds[0].reached),
            num_bytes=rank_bytes(shape, options, precision=precision),
            limit=kinds[0].memory_bytes,
        )
    columns, number = _columns(options)
    seconds, num_bytes = (
        {field.name: np.zeros(number) for field in fields(each)} for each in (StepSeconds, RankBytes)
    )
    limit, blocks = np.zeros(number), np.zeros((len(kinds), number))
    for chosen, alike in _groups(columns, [kind.ranks for kind in kinds]):
        found = _Group(shape, columns.take(chosen), alike, kinds, between, precision).prices()
        for column, of_group in ((seconds, found.seconds), (num_bytes, found.num_bytes)):
            for name, values in column.items():
                values[chosen] = getattr(of_group, name)
        limit[chosen], blocks[:, chosen] = found.limit, found.blocks
    return Prices(
        seconds=StepSeconds(**_as_asked(options, seconds)),
        num_bytes=RankBytes(**_as_asked(options, num_bytes)),
        limit=limit,
        blocks=blocks,
    )


def transformer_fit(
    shape: Shape, options: Options, kinds: Sequence[KindOfRank], *, precision: Precision = BF16
) -> NDArray[np.bool_]:
    """Whether candidates fit in memory; the same as of `transformer_prices`, without the seconds."""
    if len(kinds) == 1:
        fit = rank_bytes(shape, options, precision=precision).total <= kinds[0].memory_bytes
        return np.asarray(fit, dtype=bool)
    columns, number = _columns(options)
    found = np.zeros(number, dtype=bool)
    for chosen, alike in _groups(columns, [kind.ranks for kind in kinds]):
        group = _Group(shape, columns.take(chosen), alike, kinds, kinds[0].rates, precision)
        found[chosen] = group.fit()
    return found


def _columns(options: Options) -> tuple[Options, int]:
    """Options as columns of one length, and that."""
    number = np.broadcast(*(getattr(options, name) for name in options.names())).size
    columns = {
        name: np.broadcast_to(np.asarray(getattr(options, name), dtype=float), (number,))
        for name in options.names()
    }
    return Options(**columns), number


def _as_asked(options: Options, columns: dict[str, Floats]) -> dict[str, Numbers]:
    """Numbers of one candidate, columns of several."""
    if any(np.ndim(getattr(options, name)) for name in options.names()):
        return dict(columns)
    return {name: column[0] for name, column in columns.items()}


def _groups(options: Options, ranks: Sequence[int]) -> Iterator[tuple[NDArray[np.intp], list[_StagesAlike]]]:
    """Candidates whose stages lie on the same kinds of nodes."""
    apart = (options.pipeline > 1) & (options.placement == Placement.PDT)
    distinct, which = np.unique(np.where(apart, options.pipeline, -options.pipeline), return_inverse=True)
    for number, signed in enumerate(distinct.tolist()):
        alike = stages_alike(ranks, int(abs(signed)), apart=signed > 0)
        yield np.flatnonzero(which == number), alike


class _Group:
    """Candidates whose stages lie on the same kinds of nodes."""

    def __init__(
        self,
        shape: Shape,
        options: Options,
        alike: list[_StagesAlike],
        kinds: Sequence[KindOfRank],
        between: Rates,
        precision: Precision,
    ):
        self._shape, self._options, self._alike, self._kinds = shape, options, alike, kinds
        self._between, self._precision = between, precision
        self._slow = max({kind for each in alike for kind in each.kinds}, key=self._slowness)
        self._number = len(np.asarray(options.pipeline))
        self._limits = np.array([min(kinds[k].memory_bytes for k in each.kinds) for each in alike])
        self._memories = np.array(
            [min(float(kinds[k].rates.memory_Bps) for k in each.kinds) for each in alike]
        )
        self._bytes_of_few: dict[bool, tuple[RankBytes, RankBytes]] = {}
        self._stages = np.array([each.stages for each in alike], dtype=float)[:, None]

    def fit(self) -> NDArray[np.bool_]:
        """Whether the blocks of each candidate can be dealt so that every rank has memory for its own."""
        caps, layers = self._caps(), self._shape.layers
        each_equal = (np.ceil(layers / self._stages.sum()) <= caps).all(axis=0)
        enough = (self._stages * np.minimum(caps, layers)).sum(axis=0) >= layers
        found: NDArray[np.bool_] = np.where(
            np.asarray(self._options.whole_layers) > 0,
            each_equal,
            enough & (caps >= self._options.virtual).all(axis=0),
        )
        return found

    def prices(self) -> Prices:
        shape, options, kinds = self._shape, self._options, self._kinds
        used = sorted({kind for each in self._alike for kind in each.kinds})
        of_kinds = {k: block_seconds(shape, options, kinds[k].rates, kinds[k].reached) for k in used}
        of_stages = [_slowest([of_kinds[k] for k in each.kinds]) for each in self._alike]
        last = [head_seconds(shape, options, kinds[k].rates, kinds[k].reached) for k in self._alike[-1].kinds]
        head = self._wide(np.maximum.reduce(last))
        totals = np.stack([self._wide(block.total) for block in of_stages])
        rates = self._rates()
        # What a block adds to the end of a step, spread over its microbatches.
        ends = np.stack([self._end(rates, memory) for memory in self._memories]) / options.microbatches
        heads = np.zeros_like(totals)
        heads[-1] = head
        # What does not fit is priced all the same, without regard for memory.
        most = self._dealt(totals + ends, heads, np.where(self.fit(), self._caps(), np.inf))
        slowest = np.argmax(most * (totals + ends) + heads, axis=0)
        share = self._stages / totals  # as blocks would be dealt if they could be cut
        seconds = step_of_stages(
            shape,
            options,
            replace(rates, memory_Bps=self._memories[slowest]),
            self._kinds[self._slow].reached,
            block=_mean(of_stages, share / share.sum(axis=0)),
            head=head,
            slowest=np.take_along_axis(most * totals + heads, slowest[None], axis=0)[0],
            slowest_blocks=np.take_along_axis(most, slowest[None], axis=0)[0],
        )
        num_bytes, limit = self._neediest(most)
        blocks = np.zeros((len(self._kinds), self._number))
        for each, of_each in zip(self._alike, most, strict=True):
            for kind in each.kinds:
                blocks[kind] = np.maximum(blocks[kind], of_each)
        return Prices(seconds=seconds, num_bytes=num_bytes, limit=limit, blocks=blocks)

    def _end(self, rates: Rates, memory_rate: float) -> Floats:
        """Seconds by which a block more makes sums over replicas, and updates, longer."""
        reached, own = self._kinds[self._slow].reached, replace(rates, memory_Bps=memory_rate)
        found = 0.0
        for blocks, sign in ((1.0, 1.0), (0.0, -1.0)):
            parameters = rank_parameters(self._shape, self._options, blocks)
            found += sign * all_reduce_seconds(parameters, self._options, own, reached)
            updated = updated_parameters(self._shape, self._options, blocks)
            found += sign * update_seconds(updated, self._options, own, reached)
        ends: Floats = self._wide(found)
        return ends

    def _slowness(self, kind: int) -> float:
        return -float(self._kinds[kind].rates.flops_per_s)

    def _caps(self) -> Floats:
        """Blocks that fit in the memory of a pipeline rank: (alike, ways)."""
        found = []
        for each, limit in zip(self._alike, self._limits, strict=True):
            none, one = (num_bytes.total for num_bytes in self._of_no_block_and_of_one(each.last))
            found.append(self._wide(np.floor((limit - none) / np.maximum(one - none, 1.0) + _ROUNDING)))
        return np.stack(found)

    def _bytes(self, each: _StagesAlike, blocks: Numbers) -> RankBytes:
        none, one = self._of_no_block_and_of_one(each.last)
        ends = {
            field.name: (getattr(none, field.name), getattr(one, field.name)) for field in fields(RankBytes)
        }
        return RankBytes(**{name: at_0 + blocks * (at_1 - at_0) for name, (at_0, at_1) in ends.items()})

    def _of_no_block_and_of_one(self, last: bool) -> tuple[RankBytes, RankBytes]:
        """Bytes of a rank at both; between them, and beyond, they lie on a line."""
        if last not in self._bytes_of_few:
            none, one = (
                stage_bytes(self._shape, self._options, blocks, last=last, precision=self._precision)
                for blocks in (0.0, 1.0)
            )
            self._bytes_of_few[last] = none, one
        return self._bytes_of_few[last]

    def _dealt(self, totals: Floats, heads: Floats, caps: Floats) -> Floats:
        """Blocks of a pipeline rank, at most: (alike, ways)."""
        layers = self._shape.layers
        each_equal = np.full_like(totals, np.ceil(layers / self._stages.sum()))
        low, high = np.zeros(self._number), layers * totals.max(axis=0) + heads[-1]
        found = self._within(high - heads, totals, caps)
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            blocks = self._within(middle - heads, totals, caps)
            enough = (self._stages * blocks).sum(axis=0) >= layers
            found = np.where(enough, blocks, found)
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return np.where(np.asarray(self._options.whole_layers) > 0, each_equal, found)

    def _within(self, left: Floats, totals: Floats, caps: Floats) -> Floats:
        """Blocks that pipeline ranks compute in the time that is left; at least one for each stage."""
        blocks = np.maximum(np.floor(left / totals + _ROUNDING), self._options.virtual)
        return np.minimum(blocks, np.minimum(caps, self._shape.layers))

    def _neediest(self, most: Floats) -> tuple[RankBytes, Floats]:
        found: RankBytes | None = None
        limit = np.zeros(self._number)
        for each, blocks, own_limit in zip(self._alike, most, self._limits, strict=True):
            of_each = self._bytes(each, blocks)
            if found is None:
                found, limit = of_each, np.full(self._number, own_limit)
                continue
            closer = self._wide(of_each.total - own_limit > found.total - limit)
            found, limit = needier(found, of_each, closer), np.where(closer, own_limit, limit)
        assert found is not None
        return found, limit

    def _rates(self) -> Rates:
        if any(len(each.kinds) > 1 for each in self._alike):
            return self._between
        return rates_among([self._kinds[each.kinds[0]] for each in self._alike], self._between)

    def _wide(self, numbers: Any) -> Any:
        return np.broadcast_to(np.asarray(numbers), (self._number,))


def _slowest(blocks: list[BlockSeconds]) -> BlockSeconds:
    """A block whose replicas on several kinds of nodes wait for one another."""
    if len(blocks) == 1:
        return blocks[0]
    slowest = np.argmax(np.stack(np.broadcast_arrays(*(block.total for block in blocks))), axis=0)
    return BlockSeconds(
        **{
            field.name: np.choose(
                slowest, np.broadcast_arrays(*(getattr(block, field.name) for block in blocks))
            )
            for field in fields(BlockSeconds)
        }
    )


def _mean(blocks: list[BlockSeconds], share: Floats) -> BlockSeconds:
    """The mean block, where so many of all are of each."""
    return BlockSeconds(
        **{
            field.name: sum(
                part * getattr(block, field.name) for part, block in zip(share, blocks, strict=True)
            )
            for field in fields(BlockSeconds)
        }
    )

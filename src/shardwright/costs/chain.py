"""Candidates that cut a chain of layers alike, and how they cut it.

Stages are consecutive layers: for every number of stages, the cuts whose slowest stage is fastest, on the
nodes that each stage occupies.

Cuts a chain into consecutive stages, by an exact solution.

Of all ways to cut n atoms into p intervals, it finds one with the cheapest dearest interval; among those one
with the smallest sum (the fewest bytes sent), then the most even one::

    f_s(j) = min over i < j of max( f_{s-1}(i), cost_s(i, j) )        s stages hold the first j atoms

Each step is one numpy reduction over an n x n table: O(p n^2) in all.

The cost of a training step of a chain of layers, in seconds and bytes, for many candidates.

A layer of a microbatch of b samples takes, forward::

    kernels + b * FLOPs / (peak * efficiency) + (b * numbers moved + parameters) * width / bandwidth

and twice as much backward, half of it for weight gradients. `split` cuts the chain.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs.calibration import Efficiencies
from shardwright.costs.inputs import Offload, Options, Placement, Rates, Recompute, ScheduleKind
from shardwright.costs.kinds import KindOfRank, Prices, rates_among, stages_alike
from shardwright.costs.links import Peers, Price, RankRates, hop_seconds, offload_seconds
from shardwright.costs.memory import (
    Precision,
    RankBytes,
    in_flight,
    needier,
    offloaded,
    offloaded_activations,
    state_bytes,
)
from shardwright.costs.step import (
    StepSeconds,
    all_reduce_seconds,
    bubble_seconds,
    exposed_seconds,
    shard_seconds,
    update_seconds,
)
from shardwright.errors import PlanError
from shardwright.model_graph import Work

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class _Group:
    """Candidates that cut the chain alike.

    Attributes:
        ends: for each stage, the layer behind its last.
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


def _by_group(chain: LayerChain, options: Options, kinds: Sequence[KindOfRank], price: Any, kind: Any) -> Any:
    """Prices each group of candidates at once."""
    number = np.broadcast(*(getattr(options, name) for name in options.names())).size
    is_one = all(np.ndim(getattr(options, name)) == 0 for name in options.names())
    columns = {name: np.zeros(number) for name in kind.__dataclass_fields__}
    for group in _groups(chain, options, kinds, number):
        found = price(group)
        for name, column in columns.items():
            column[group.chosen] = getattr(found, name)
    return kind(**{name: column[0] if is_one else column for name, column in columns.items()})


def _groups(
    chain: LayerChain, options: Options, kinds: Sequence[KindOfRank], number: int
) -> Iterator[_Group]:
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
        yield _Group(chosen, flat.take(chosen), stage_ends(weights, stages, speeds), ranks, of_ranks)


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
    return float(kind.rates.flops_per_s * _flops_share(kind.reached))


def _flops_share(reached: Efficiencies) -> float:
    """The share of a device's peak that matrix products reach."""
    return float(min(reached.matmul * reached.matmul_factor, 1.0))


def _rank_of(stage: int, pipeline: int, schedule: int) -> int:
    if schedule == ScheduleKind.ZB_V and stage >= pipeline:
        return 2 * pipeline - 1 - stage
    return stage % pipeline


# Weight of evenness against the sum: small enough never to outweigh a byte, large enough for float64.
_EVENNESS = 1e-6


def split(
    num_atoms: int, *, num_stages: int, cost_of_stage: Callable[[int], Floats]
) -> tuple[int, ...] | None:
    """Cuts a chain in intervals, the dearest as cheap as possible.

    >>> ends = np.array([0.0, 1.0, 3.0, 4.0, 8.0])
    >>> cost = np.where(np.tri(5, dtype=bool), np.inf, ends[None, :] - ends[:, None])
    >>> split(4, num_stages=2, cost_of_stage=lambda stage: cost)
    (0, 3, 4)
    """
    if num_stages > num_atoms:
        raise PlanError(
            f"{num_stages} stages were asked for, but the model has only {num_atoms} pieces that can be "
            f"placed apart. Use at most {num_atoms} stages, or split large modules into smaller ones."
        )
    bottleneck = _solve(num_atoms, num_stages, cost_of_stage, np.maximum)
    worst = bottleneck[-1][num_atoms]
    if not np.isfinite(worst):
        return None
    last: tuple[Floats, Floats] | None = None

    def tie_break(stage: int) -> Floats:
        nonlocal last
        cost = cost_of_stage(stage)
        # Most schedules give several stages one table.
        if last is None or last[0] is not cost:
            allowed = np.where(cost <= worst, cost, np.inf)
            last = cost, (allowed + _EVENNESS / worst * allowed * allowed) if worst > 0 else allowed
        return last[1]

    best = _solve(num_atoms, num_stages, tie_break, np.add)
    return _trace_back(num_atoms, best, tie_break)


def _solve(
    num_atoms: int, num_stages: int, cost_of_stage: Callable[[int], Floats], join: np.ufunc
) -> list[Floats]:
    """Row s holds, for each j, the best joined cost of the first j atoms on stages 0 to s."""
    rows = [cost_of_stage(0)[0].copy()]
    rows[0][0] = np.inf
    for stage in range(1, num_stages):
        # Stage s starts at atom s or later and leaves an atom for each stage after it.
        low, high = stage, num_atoms - (num_stages - stage)
        row = np.full(num_atoms + 1, np.inf)
        cost = cost_of_stage(stage)[low : high + 1, low + 1 : high + 2]
        before = rows[-1][low : high + 1]
        row[low + 1 : high + 2] = join(before[:, None], cost).min(axis=0)
        rows.append(row)
    return rows


def _trace_back(
    num_atoms: int, rows: Sequence[Floats], cost_of_stage: Callable[[int], Floats]
) -> tuple[int, ...]:
    cuts = [num_atoms]
    for stage in range(len(rows) - 1, 0, -1):
        end = cuts[-1]
        totals = rows[stage - 1][:end] + cost_of_stage(stage)[:end, end]
        cuts.append(int(np.argmin(totals)))
    return (0, *reversed(cuts))


def chain_prices(
    chain: LayerChain,
    options: Options,
    kinds: Sequence[KindOfRank],
    between: Rates,
    *,
    precision: Precision,
    width: int,
    hides_messages: bool = True,
) -> Prices:
    """Seconds and bytes of every candidate, on nodes of one kind or several.

    `hides_messages`: of those between stages, what other microbatches do not hide counts, as it does for
    transformers; otherwise all of them.
    """

    def price(group: _Group) -> StepSeconds:
        apart = all(len(there) == 1 for there in group.kinds)
        return _seconds_of(
            chain,
            group,
            rates_among([there[0] for there in group.kinds], between) if apart else between,
            width,
            hides_messages,
        )

    num_bytes, limit = chain_bytes(chain, options, kinds, precision=precision, width=width)
    seconds = _by_group(chain, options, kinds, price, StepSeconds)
    return Prices(seconds=seconds, num_bytes=num_bytes, limit=limit)


def chain_bytes(
    chain: LayerChain, options: Options, kinds: Sequence[KindOfRank], *, precision: Precision, width: int
) -> tuple[RankBytes, Floats]:
    """Bytes of every candidate on the rank that is closest to its limit, and that limit."""
    limit = np.zeros(np.broadcast(*(getattr(options, name) for name in options.names())).size)

    def measure(group: _Group) -> RankBytes:
        found, limit[group.chosen] = _bytes_of(chain, group, precision, width)
        return found

    return _by_group(chain, options, kinds, measure, RankBytes), limit


def _memory_rate(kind: KindOfRank) -> float:
    return float(kind.rates.memory_Bps * min(kind.reached.memory, 1.0))


def _seconds_of(
    chain: LayerChain, group: _Group, rates: Rates, width: int, hides_messages: bool
) -> StepSeconds:
    o = group.options
    p, m = o.pipeline, o.microbatches
    reached = min((kind for there in group.kinds for kind in there), key=flops_per_s).reached
    parameters = group.of_ranks(np.array(chain.column("parameters"), dtype=float))
    price = _price(chain, group, reached, width)
    again = np.where(np.asarray(o.recompute) == Recompute.FULL, 1.0, 0.0)
    forward, weight = price.forward.mean(axis=1), price.weight.mean(axis=1)
    exchange = _exchange_seconds(chain, group, rates, reached, width)
    works = price.forward + price.backward + again[:, None] * price.forward + exchange
    exchanged = exchange.mean(axis=1)
    mean, slowest = works.mean(axis=1), works.max(axis=1)
    held = parameters.max()
    trained = (parameters - group.of_ranks(np.array(chain.column("frozen")))).max()
    hop = hop_seconds(o, o.microbatch * (_crossing(chain, group) * width), rates, reached)
    bubble = bubble_seconds(o, mean=mean, weight=weight, hop=hop)
    share = trained / max(held, 1.0)
    gather, scatter = shard_seconds(held * np.ones_like(mean), o, rates, reached, trained=share)
    exposed = exposed_seconds(
        o,
        reached,
        hop=hop,
        gather=gather,
        scatter=scatter,
        offload=offload_seconds(o, o.microbatch * _kept(chain, group).max() * width, rates),
        sums=all_reduce_seconds(trained, o, rates, reached),
        beside=mean + bubble / m,
        backward=price.backward.mean(axis=1),
        hides_hops=hides_messages,
    )
    return StepSeconds(
        compute=m * (mean - again * forward - exchanged),
        recompute=m * again * forward,
        imbalance=m * (slowest - mean),
        tensor=m * exchanged,
        context=0.0,
        expert=0.0,
        bubble=bubble,
        update=update_seconds(trained, o, rates, reached),
        overhead=reached.step_s + m * (reached.microbatch_s + len(chain.layers) / p * reached.layer_s),
        **exposed,
    )


def _price(chain: LayerChain, group: _Group, reached: Efficiencies, width: int) -> Price:
    """Seconds of a microbatch on each pipeline rank: (candidates, ranks)."""

    def of_ranks(name: str) -> Floats:
        return group.of_ranks(np.array(chain.column(name), dtype=float))

    samples = np.asarray(group.options.microbatch)[:, None]
    # The slowest nodes of each pipeline rank; their shares are in what they reach.
    rates = RankRates(
        peak=group.slowest(flops_per_s) / _flops_share(reached),
        memory=group.slowest(_memory_rate) / min(reached.memory, 1.0),
        reached=replace(reached, kernel_s=-group.slowest(lambda kind: -kind.reached.kernel_s)),
    )
    frozen = of_ranks("frozen") / np.maximum(of_ranks("parameters"), 1.0)
    found = rates.price(
        Work(
            products=of_ranks("products"),
            product_flops=samples * of_ranks("flops"),
            product_bytes=(samples * of_ranks("product_moved") + of_ranks("parameters") / 2) * width,
            attention_flops=samples * of_ranks("attention"),
            kernels=of_ranks("kernels"),
            moved_bytes=samples * of_ranks("moved") * width,
        )
    )
    of_frozen = frozen * found.weight
    return found._replace(backward=found.backward - of_frozen, weight=found.weight - of_frozen)


def _exchange_seconds(
    chain: LayerChain, group: _Group, rates: Rates, reached: Efficiencies, width: int
) -> Floats:
    """Seconds in which ranks that share layers exchange for a microbatch: (candidates, pipeline ranks)."""
    peers = Peers(rates, reached, np.asarray(group.options.tensor, dtype=float))
    calls = group.of_ranks(np.array(chain.column("collectives"), dtype=float))
    sent = group.of_ranks(np.array(chain.column("sent"), dtype=float)) * width
    samples = np.asarray(group.options.microbatch, dtype=float)
    dispatch = group.of_ranks(np.array(chain.column("dispatch_s"), dtype=float))
    exchanged = np.multiply.outer(samples / peers.ring_rate(), sent)
    found: Floats = np.multiply.outer(2 * peers.latency_s, calls) + exchanged + dispatch
    return found


def _crossing(chain: LayerChain, group: _Group) -> float:
    """Numbers of a sample that cross the widest cut."""
    cuts = [end - 1 for end in group.ends[:-1]]
    return max((chain.layers[cut].crossing for cut in cuts), default=0.0)


def _kept(chain: LayerChain, group: _Group) -> Floats:
    """Numbers that the layers of each pipeline rank keep of a sample: (ranks,)."""
    full = np.asarray(group.options.recompute)[0] == Recompute.FULL
    return group.of_ranks(np.array(chain.column("inputs" if full else "kept")))


def _bytes_of(chain: LayerChain, group: _Group, precision: Precision, width: int) -> tuple[RankBytes, Floats]:
    """The memory of the rank closest to its limit, with that limit: all ranks are worked out."""
    o = group.options
    parameters = group.of_ranks(np.array(chain.column("parameters"), dtype=float))
    trained = 1 - group.of_ranks(np.array(chain.column("frozen"))) / np.maximum(parameters, 1.0)
    kept = _kept(chain, group)
    layers = chain.layers
    full = np.asarray(o.recompute)[0] == Recompute.FULL
    most_kept = max(chain.column("inputs" if full else "kept"))
    whole = np.where(
        np.asarray(o.recompute) == Recompute.FULL, max(layer.kept for layer in layers) * width, 0.0
    )
    largest = max(layer.parameters for layer in layers) * (2 * precision.weight + precision.gradient)
    best: RankBytes | None = None
    limits = group.slowest(lambda kind: kind.memory_bytes)
    limit = np.full(len(group.chosen), limits[0])
    for rank in range(len(parameters)):
        weights, gradients, states = state_bytes(parameters[rank], o, precision, trained=trained[rank])
        states, states_on_host = offloaded(Offload.OPTIMIZER, o, states)
        of_sample = width * np.asarray(o.microbatch)
        activations, activations_on_host = offloaded_activations(
            o, kept[rank] * of_sample * in_flight(o, rank), most_kept * of_sample
        )
        found = RankBytes(
            parameters=weights,
            gradients=gradients,
            optimizer=states,
            activations=activations,
            gathered=np.where(o.sharded >= 3, largest, 0.0),
            work=whole * np.asarray(o.microbatch),
            host=states_on_host + activations_on_host,
        )
        if best is not None:
            closer = found.total - limits[rank] > best.total - limit
            found, limit = needier(best, found, closer), np.where(closer, limits[rank], limit)
        best = found
    assert best is not None
    return best, limit

"""The cost of a training step of a chain of layers, in seconds and bytes, for many candidates.

A layer of a microbatch of b samples takes, forward::

    kernels + b * FLOPs / (peak * efficiency) + (b * numbers moved + parameters) * width / bandwidth

and twice as much backward, half of it for weight gradients. `candidate_groups` cuts the chain.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from shardwright.catalogue import LayerChain
from shardwright.costs.candidate_groups import Group, by_group, flops_per_s, flops_share
from shardwright.costs.efficiencies import Efficiencies
from shardwright.costs.inputs import Numbers, Offload, Options, Rates, Recompute, ScheduleKind
from shardwright.costs.kinds import KindOfRank, MixedPrices, rates_among
from shardwright.costs.links import hop_seconds, ring_rate
from shardwright.costs.memory import (
    Precision,
    RankBytes,
    in_flight,
    needier,
    offloaded,
    offloaded_activations,
    state_bytes,
)
from shardwright.costs.price import Price, RankRates
from shardwright.costs.step import (
    StepSeconds,
    all_reduce_seconds,
    bubble_seconds,
    shard_seconds,
    update_seconds,
)
from shardwright.work import Work

__all__ = ["chain_bytes", "chain_seconds", "mixed_chain"]

Floats = NDArray[np.float64]


def chain_seconds(
    chain: LayerChain, options: Options, rates: Rates, reached: Efficiencies, *, width: int
) -> StepSeconds:
    """Seconds of a step of every candidate."""
    found: StepSeconds = by_group(
        chain,
        options,
        _alike(rates, reached),
        lambda group: _seconds_of(chain, group, rates, width),
        StepSeconds,
    )
    return found


def chain_bytes(chain: LayerChain, options: Options, *, precision: Precision, width: int) -> RankBytes:
    """Memory of the neediest rank of every candidate."""
    found: RankBytes = by_group(
        chain,
        options,
        (),
        lambda group: _bytes_of(chain, group, precision, width)[0],
        RankBytes,
    )
    return found


def mixed_chain(
    chain: LayerChain,
    options: Options,
    kinds: Sequence[KindOfRank],
    between: Rates,
    *,
    precision: Precision,
    width: int,
) -> MixedPrices:
    """Seconds and bytes of every candidate on nodes of several kinds.

    Layers are dealt by the rates of stages' nodes alone: memory decides only what fits.
    """
    number = np.broadcast(*(getattr(options, name) for name in options.names())).size
    limit, blocks = np.zeros(number), np.zeros((len(kinds), number))

    def measure(group: Group) -> RankBytes:
        found, limit[group.chosen] = _bytes_of(chain, group, precision, width)
        layers = group.of_ranks(np.ones(len(chain.layers)))
        for index, kind in enumerate(kinds):
            own = [count for count, there in zip(layers, group.kinds, strict=True) if kind in there]
            blocks[index, group.chosen] = max(own, default=0.0)
        return found

    def price(group: Group) -> StepSeconds:
        apart = all(len(there) == 1 for there in group.kinds)
        return _seconds_of(
            chain,
            group,
            rates_among([there[0] for there in group.kinds], between) if apart else between,
            width,
        )

    return MixedPrices(
        seconds=by_group(chain, options, kinds, price, StepSeconds),
        num_bytes=by_group(chain, options, kinds, measure, RankBytes),
        limit=limit,
        blocks=blocks,
    )


def _alike(rates: Rates, reached: Efficiencies) -> tuple[KindOfRank, ...]:
    """Nodes of one kind, as many as are wanted."""
    return (KindOfRank(ranks=1, rates=rates, reached=reached, memory_bytes=0.0),)


def _memory_rate(kind: KindOfRank) -> float:
    return float(kind.rates.memory_Bps * min(kind.reached.memory, 1.0))


def _seconds_of(chain: LayerChain, group: Group, rates: Rates, width: int) -> StepSeconds:
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
    crossing = _crossing(chain, group)
    hop = _hop_seconds(o, crossing * width, rates, reached)
    # Sums over replicas begin in the last backward.
    sums = all_reduce_seconds(held, o, rates, reached)
    behind = reached.overlap * price.backward.mean(axis=1)
    gather, scatter = shard_seconds(held * np.ones_like(mean), o, rates, reached, mean)
    return StepSeconds(
        compute=m * (mean - again * forward - exchanged),
        recompute=m * again * forward,
        imbalance=m * (slowest - mean),
        tensor=m * exchanged,
        context=0.0,
        expert=0.0,
        bubble=bubble_seconds(o, mean=mean, weight=weight, hop=hop),
        point_to_point=m * hop,
        gather=gather,
        reduce_scatter=scatter,
        all_reduce=np.hypot(sums, behind) - behind,
        update=update_seconds(held, o, rates, reached),
        offload=m * _offload_seconds(chain, group, rates, reached, mean, width),
        overhead=reached.step_s + m * (reached.microbatch_s + len(chain.layers) / p * reached.layer_s),
    )


def _price(chain: LayerChain, group: Group, reached: Efficiencies, width: int) -> Price:
    """Seconds of a microbatch on each pipeline rank: (candidates, ranks)."""

    def of_ranks(name: str) -> Floats:
        return group.of_ranks(np.array(chain.column(name), dtype=float))

    samples = np.asarray(group.options.microbatch)[:, None]
    # The slowest nodes of each pipeline rank; their shares are in what they reach.
    rates = RankRates(
        peak=group.slowest(flops_per_s) / flops_share(reached),
        memory=group.slowest(_memory_rate) / min(reached.memory, 1.0),
        reached=replace(reached, kernel_s=-group.slowest(lambda kind: -kind.reached.kernel_s)),
    )
    return rates.price(
        Work(
            products=of_ranks("products"),
            product_flops=samples * of_ranks("flops"),
            product_bytes=(samples * of_ranks("product_moved") + of_ranks("parameters") / 2) * width,
            attention_flops=samples * of_ranks("attention"),
            kernels=of_ranks("kernels"),
            moved_bytes=samples * of_ranks("moved") * width,
        )
    )


def _exchange_seconds(
    chain: LayerChain, group: Group, rates: Rates, reached: Efficiencies, width: int
) -> Floats:
    """Seconds in which ranks that share layers exchange for a microbatch: (candidates, pipeline ranks)."""
    ranks = np.asarray(group.options.tensor, dtype=float)
    rate = ring_rate(
        rates, ranks=ranks, stride=1.0, link_share=reached.link, network_share=reached.reduce_network
    )
    once = np.where(ranks <= rates.per_node, rates.link_latency_s, rates.network_latency_s)
    latency = 2 * once * np.log2(np.maximum(ranks, 1.0))
    calls = group.of_ranks(np.array(chain.column("collectives"), dtype=float))
    sent = group.of_ranks(np.array(chain.column("sent"), dtype=float)) * width
    samples = np.asarray(group.options.microbatch, dtype=float)
    dispatch = group.of_ranks(np.array(chain.column("dispatch_s"), dtype=float))
    found: Floats = np.multiply.outer(latency, calls) + np.multiply.outer(samples / rate, sent) + dispatch
    return found


def _crossing(chain: LayerChain, group: Group) -> float:
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


def _kept(chain: LayerChain, group: Group) -> Floats:
    """Numbers that the layers of each pipeline rank keep of a sample: (ranks,)."""
    full = np.asarray(group.options.recompute)[0] == Recompute.FULL
    return group.of_ranks(np.array(chain.column("inputs" if full else "kept")))


def _offload_seconds(
    chain: LayerChain, group: Group, rates: Rates, reached: Efficiencies, computing: Floats, width: int
) -> Numbers:
    """Transfers of activations to the host and back, beyond what computing hides."""
    o = group.options
    once = 2 * o.microbatch * _kept(chain, group).max() * width / np.maximum(rates.host_Bps, 1.0)
    beyond = np.maximum(0.0, once - np.maximum(0.0, 1 - reached.overlap) * computing)
    return np.where(o.offload == Offload.ACTIVATIONS, beyond, 0.0)


def _bytes_of(chain: LayerChain, group: Group, precision: Precision, width: int) -> tuple[RankBytes, Floats]:
    """The memory of the rank closest to its limit, with that limit: all ranks are worked out."""
    o = group.options
    parameters = group.of_ranks(np.array(chain.column("parameters"), dtype=float))
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
        weights, gradients, states = state_bytes(parameters[rank], o, precision)
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

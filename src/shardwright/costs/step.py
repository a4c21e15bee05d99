"""The seconds of a training step, in parts that add up to it."""

from dataclasses import dataclass, fields

import numpy as np

from shardwright.costs.block import block_seconds, head_seconds, kept_bytes, tokens_of
from shardwright.costs.calibration import Efficiencies
from shardwright.costs.inputs import (
    Columns,
    Gathers,
    Numbers,
    Offload,
    Options,
    Rates,
    ScheduleKind,
    Sharded,
)
from shardwright.costs.links import Peers, beyond, hop_seconds, offload_seconds
from shardwright.costs.shape import Shape

UPDATE_BYTES, UPDATE_BYTES_32 = 36, 28
"""That Adam moves for a parameter: in 16 bits with a copy in 32, and in 32 without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds(Columns):
    """Seconds of a step; each attribute is a part of it, and all together are the step.

    Attributes:
        compute: forward and backward of all microbatches on a mean pipeline rank.
        imbalance: what the slowest pipeline rank computes beyond the mean.
        bubble: idling at the begin and the end of the pipeline.
        gather: all-gathers of parameters that computing does not hide.
        reduce_scatter: reduce-scatters of gradients that computing does not hide.
        offload: transfers to and from the host's memory that computing does not hide.
    """

    compute: Numbers
    recompute: Numbers
    imbalance: Numbers
    tensor: Numbers
    context: Numbers
    expert: Numbers
    bubble: Numbers
    point_to_point: Numbers
    gather: Numbers
    reduce_scatter: Numbers
    all_reduce: Numbers
    update: Numbers
    offload: Numbers
    overhead: Numbers

    @property
    def total(self) -> Numbers:
        return sum(getattr(self, field.name) for field in fields(self))


def step_seconds(shape: Shape, options: Options, rates: Rates, reached: Efficiencies) -> StepSeconds:
    block = block_seconds(shape, options, rates, reached)
    head = head_seconds(shape, options, rates, reached)
    slowest = slowest_stage(shape, options, block.total, head)
    p, m = options.pipeline, options.microbatches
    blocks = shape.layers / p
    mean = blocks * block.total + head / p
    sent = options.width * tokens_of(shape, options) * shape.hidden / options.tensor
    hop = hop_seconds(options, sent, rates, reached)
    bubble = bubble_seconds(options, mean=mean, weight=blocks * block.weight, hop=hop)
    parameters = _rank_parameters(shape, options)
    gather, scatter = shard_seconds(parameters, options, rates, reached, trained=shape.trained)
    exposed = exposed_seconds(
        options,
        reached,
        hop=hop,
        gather=gather,
        scatter=scatter,
        offload=blocks * offload_seconds(options, kept_bytes(shape, options), rates),
        sums=all_reduce_seconds(shape.trained * parameters, options, rates, reached),
        beside=mean + bubble / m,
        backward=blocks * block.elapsed_backward,
    )
    return StepSeconds(
        compute=m * (blocks * (block.forward + block.backward) + head / p),
        recompute=m * blocks * block.recompute,
        imbalance=m * (slowest - mean),
        tensor=m * blocks * block.tensor,
        context=m * blocks * block.context,
        expert=m * blocks * block.expert,
        bubble=bubble,
        update=update_seconds(shape.trained * _updated_parameters(shape, options), options, rates, reached),
        overhead=reached.step_s + m * (reached.microbatch_s + blocks * reached.layer_s),
        **exposed,
    )


def exposed_seconds(
    options: Options,
    reached: Efficiencies,
    *,
    hop: Numbers,
    gather: Numbers,
    scatter: Numbers,
    offload: Numbers,
    sums: Numbers,
    beside: Numbers,
    backward: Numbers,
    hides_hops: bool = True,
) -> dict[str, Numbers]:
    """Seconds of a step's traffic beyond all else, of which a second hides one, whosever that is.

    Else faster products could make a step slower. Traffic passes while a rank waits, too. Messages travel
    while other microbatches compute. Sums over replicas begin in the last backward, and have what the others
    leave of it.

    Args:
        hop: of a microbatch, as `gather`, `scatter` and `offload`.
        sums: of a step.
        beside: a microbatch and its share of the bubble; `backward`: a part of that.
    """
    m = options.microbatches
    passing = np.where(m > 1, hop, 0.0) * hides_hops
    together = passing + gather + scatter + offload
    exposed = beyond(reached, together, beside)
    share = exposed / np.where(together > 0, together, 1.0)
    left = np.maximum(backward - (together - exposed), 0.0)
    return {
        "point_to_point": m * (hop - (1 - share) * passing),
        "gather": m * share * gather,
        "reduce_scatter": m * share * scatter,
        "all_reduce": beyond(reached, sums, left),
        "offload": m * share * offload,
    }


def _rank_parameters(shape: Shape, options: Options) -> Numbers:
    """Parameters that a pipeline rank has, over its tensor parallel ranks, with its tables."""
    blocks = shape.layers / options.pipeline
    experts = np.maximum(1.0, shape.experts / options.expert)
    block = shape.attention_parameters + shape.held_parameters(experts)
    split = (blocks * block + shape.table_parameters(options.pipeline)) / options.tensor
    return split + blocks * shape.latent_parameters


def _updated_parameters(shape: Shape, options: Options) -> Numbers:
    """Parameters whose updates the shard group of a pipeline rank divides."""
    blocks = shape.layers / options.pipeline
    experts = np.maximum(1.0, shape.experts / options.expert)
    routed = blocks * (1 - shape.dense) * experts * shape.mlp_parameters / options.tensor
    divided = np.asarray(options.sharded) >= Sharded.OPTIMIZER
    times = np.where(divided, options.shard / options.expert_shard, 1.0)
    return _rank_parameters(shape, options) + (times - 1) * routed


def slowest_stage(shape: Shape, options: Options, block: Numbers, head: Numbers) -> Numbers:
    """The rank with most work: of equal ones, the last, which has the head; else whole blocks, balanced.

    The embedding counts as a block's worth on the first stage, as the head does on the last.
    """
    p = options.pipeline
    equal = shape.layers / p * block + head
    # Where ranks cannot have as many blocks each, the stages of one differ.
    even = shape.layers % p == 0
    virtual = np.where(even, options.virtual, 1.0)
    stages = p * virtual
    share = (shape.layers * block + head) / stages / block

    def with_blocks(others: Numbers) -> Numbers:
        last = np.maximum(shape.layers - (stages - 1) * others, 0.0)
        inner = (virtual - 1) * others * block
        return np.maximum(inner + others * block, inner + last * block + head)

    # No number of blocks in the other stages is better than both next to an equal share of all work.
    few = np.floor(share)
    balanced = np.where(stages > 1, np.minimum(with_blocks(few), with_blocks(few + 1)), equal)
    cut = np.where(even, np.minimum(balanced, equal), balanced)
    return np.where(np.asarray(options.whole_layers) > 0, equal, cut)


def bubble_seconds(options: Options, *, mean: Numbers, weight: Numbers, hop: Numbers) -> Numbers:
    """Idling of a pipeline, of which a microbatch takes `mean` a rank, `weight` of it for weights."""
    p, kind = options.pipeline, options.schedule
    full = (p - 1) * (mean + hop)
    by_kind = np.where(kind == ScheduleKind.INTERLEAVED, full / options.virtual, full)
    filled = np.where(kind == ScheduleKind.ZB_H1, (p - 1) * (mean + hop - 2 * weight), 0.0)
    # Weight gradients fill what there is of them: a microbatch goes through all stages and back all the same.
    at_least = (p - 1) * (mean + hop - weight) - (options.microbatches - 1) * weight
    by_kind = np.where(options.delays_weights, np.maximum(np.maximum(filled, at_least), 0.0), by_kind)
    return np.where(p > 1, by_kind, 0.0)


def shard_seconds(
    parameters: Numbers,
    options: Options,
    rates: Rates,
    reached: Efficiencies,
    *,
    trained: Numbers = 1.0,
) -> tuple[Numbers, Numbers]:
    """Seconds of gathers and of reduce-scatters of shards, for a microbatch."""
    peers = Peers(rates, reached, options.shard, options.shard_stride)
    flat = peers.ring_seconds(options.width * parameters, gathers=True)
    by_nodes = peers.seconds_by_nodes(options.width * parameters)
    faster = np.where(options.hierarchical == Gathers.FASTER, np.minimum(by_nodes, flat), by_nodes)
    once = np.where(options.hierarchical == Gathers.FLAT, flat, faster)
    gathers = np.where(options.sharded == Sharded.PARAMETERS, 2.0, 0.0)
    scatters = np.where(options.sharded >= Sharded.GRADIENTS, trained, 0.0)
    return gathers * once, scatters * once


def all_reduce_seconds(parameters: Numbers, options: Options, rates: Rates, reached: Efficiencies) -> Numbers:
    """Sums over replicas once a step: of what a rank keeps, or a reduce-scatter and a gather of it."""
    shard = np.where(options.sharded >= Sharded.GRADIENTS, options.shard, 1.0)
    # Ranks that share a sequence have parts of the same gradients, too.
    replicas = options.data * options.context / shard
    peers = Peers(rates, reached, replicas, options.inner_stride * shard)
    return 2 * peers.ring_seconds(options.width * parameters / shard)


def update_seconds(parameters: Numbers, options: Options, rates: Rates, reached: Efficiencies) -> Numbers:
    """Seconds of the optimizer, for the parameters of a pipeline rank, with what ZeRO-1 gathers here."""
    shard = np.where(options.sharded >= Sharded.OPTIMIZER, options.shard, 1.0)
    own = parameters / shard
    on_host = options.offload == Offload.OPTIMIZER
    rate = np.where(on_host, np.maximum(rates.host_Bps, 1.0), rates.memory_Bps * reached.update)
    peers = Peers(rates, reached, options.shard, options.shard_stride)
    gathered = peers.ring_seconds(options.width * parameters, gathers=True)
    gathers = np.logical_and(options.sharded == Sharded.OPTIMIZER, np.asarray(options.as_here) > 0)
    moved = own * np.where(np.asarray(options.width) > 2, UPDATE_BYTES_32, UPDATE_BYTES)
    return moved / rate + np.where(gathers, gathered, 0.0)

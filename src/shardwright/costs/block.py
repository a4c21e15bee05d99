"""The activations that a block keeps for its backward: below in 16 bits, twice as much in 32.

After Korthikanti et al. 2022, arXiv:2205.05198, with the actual key heads, MLP widths and experts::

    tokens * (10 h / (t or 1) + (8 h + 16 h + 5 a s) / t)      for h wide blocks with MLPs four times as wide

The cost of a transformer block, and of the head, on one rank for one microbatch.

Products of matrices (M, K) and (K, N) take::

    kernel + 2 M N K / (peak * efficiency) * (1 + half_size / min(M, N, K)) + bytes / (2 * bandwidth)

a smooth roofline in which small sides waste a part of the machine. Attention without fusion also writes and
reads its scores; fused attention does not, and skips what a causal mask hides.
"""

from dataclasses import dataclass

import numpy as np

from shardwright.costs.calibration import Efficiencies
from shardwright.costs.inputs import Dispatch, Hides, Numbers, Options, Rates, Recompute
from shardwright.costs.links import (
    ATTENTION_BACKWARD,
    ELEMENTWISE_BACKWARD,
    Peers,
    RankRates,
    beyond,
)
from shardwright.costs.shape import Shape

# Bytes of a token and hidden element that tensor parallelism leaves whole; without masks of dropout fewer.
_WHOLE, _WHOLE_FUSED = 10, 8
_SCORES = 5  # bytes of a token, head and key


def kept_bytes(shape: Shape, options: Options) -> Numbers:
    """Bytes that a mean block keeps for the backward of one microbatch, wherever they are."""
    inputs = options.width * tokens_of(shape, options) * shape.hidden / _divided(options)
    kept = _block_bytes(shape, options, scores=options.recompute != Recompute.SELECTIVE)
    share = options.recomputed(shape.layers)
    return share * inputs + (1 - share) * kept


def whole_block_bytes(shape: Shape, options: Options) -> Numbers:
    """Bytes of a mean block when nothing of it is left to be computed again."""
    return _block_bytes(shape, options, scores=True)


def tokens_of(shape: Shape, options: Options) -> Numbers:
    """Tokens of a microbatch on a rank."""
    return options.microbatch * shape.sequence / options.context


def _block_bytes(shape: Shape, options: Options, *, scores: Numbers) -> Numbers:
    # Inputs of products: the two norms' results, what attention makes, what the MLP's activation makes.
    input_bytes = np.where(np.asarray(options.float8) > 0, 1, 2)
    attention = (1 + shape.cross) * (
        2 * (shape.queries + shape.keys + shape.values) + input_bytes * shape.outputs
    )
    of_activation = np.where(np.asarray(options.fused) > 0, 1, 1 + shape.gated)
    mlp = shape.ffn_of_token * (2 * (1 + shape.gated) + 2 * (of_activation - 1) + input_bytes)
    kept_scores = np.where(np.logical_and(scores, options.flash == 0), _SCORES, 0)
    of_scores = (1 + shape.cross) * kept_scores * shape.heads * shape.sequence / options.context
    # The narrow vectors of latent attention, before and behind their norms.
    of_stream = np.where(np.asarray(options.fused) > 0, _WHOLE_FUSED, _WHOLE) - 2 * (2 - input_bytes)
    whole = of_stream * shape.hidden / _divided(options) + 4 * shape.latent_width
    return (
        options.width
        / 2
        * tokens_of(shape, options)
        * (whole + (attention + mlp + of_scores) / options.tensor)
    )


def _divided(options: Options) -> Numbers:
    """Over how many ranks the residual stream is divided."""
    return np.where(options.sequence_parallel > 0, options.tensor, 1.0)


_ELEMENTWISE_KERNELS = 12
_ELEMENTWISE_WHOLE, _ELEMENTWISE_SPLIT = 14, 18
_ROUTED, _OF_EXPERT = 6, 3
"""Elements that a token moves for each of its experts: it is sorted there and back, and activated in it."""

_LOSS_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSeconds:
    """Seconds of a block and microbatch on one rank.

    Attributes:
        weight: the part of the backward that weights' gradients take.
        tensor: collectives of tensor parallelism beyond what hides them, forward, backward and again.
        context: what exchanging keys and values takes beyond the computing that hides it.
        elapsed_backward: of the backward, with what is exposed beside its products.
    """

    forward: Numbers
    backward: Numbers
    recompute: Numbers
    weight: Numbers
    tensor: Numbers
    context: Numbers
    expert: Numbers
    elapsed_backward: Numbers

    @property
    def computing(self) -> Numbers:
        """Without communication."""
        return self.forward + self.backward + self.recompute

    @property
    def total(self) -> Numbers:
        return self.computing + self.tensor + self.context + self.expert


_CAST_BYTES = 4
"""Bytes that casting an element of a product's input to 8 bits moves: it is read, and written twice."""


@dataclass(frozen=True, slots=True)
class _Rank(RankRates):
    """A rank of which products with a small side waste a part.

    Attributes:
        float8: 1 where products are in 8 bits; `peak` is then the rate of those.
    """

    width: Numbers
    float8: Numbers = 0

    def product(self, rows: Numbers, inner: Numbers, columns: Numbers, *, share: Numbers = 1.0) -> Numbers:
        """Seconds of a product; `share`: of the rate of large ones that such products reach."""
        smallest = np.minimum(np.minimum(rows, columns), inner)
        flops = 2.0 * rows * columns * inner
        moved = self.width * (rows * columns + columns * inner + rows * inner)
        float8 = np.asarray(self.float8) > 0
        reached = share * np.where(float8, self.reached.float8, 1.0)
        cast = np.where(float8, _CAST_BYTES * rows * inner, 0.0)
        return (
            self.reached.kernel_s
            + flops / (self.flops_rate * reached) * (1 + self.reached.half_size / smallest)
            + (0.5 * moved + cast) / self.memory_rate
        )


def block_seconds(shape: Shape, options: Options, rates: Rates, reached: Efficiencies) -> BlockSeconds:
    rank = _Rank(rates.flops_per_s, rates.memory_Bps, reached, options.width)
    weights_rank = _Rank(
        np.where(options.float8, np.maximum(rates.float8_flops_per_s, rates.flops_per_s), rates.flops_per_s),
        rates.memory_Bps,
        reached,
        options.width,
        options.float8,
    )
    tokens = tokens_of(shape, options)
    products = _products(weights_rank, shape, options, tokens)
    attention, attention_backward = _attention(rank, shape, options, tokens)
    elementwise = _elementwise(rank, shape, options, tokens)
    forward = products + attention + elementwise
    again_whole, selective = options.recomputed(shape.layers), options.recompute == Recompute.SELECTIVE
    again = np.where(options.flash > 0, 0.0, attention)
    of_weights = shape.trained * products
    backward = products + of_weights + attention_backward + ELEMENTWISE_BACKWARD * elementwise
    # What a backward does not need: the product that ends a block without experts, the reduce-scatter or the
    # all-reduce behind it, what comes back of experts.
    spared = np.where(np.asarray(options.stops_early) > 0, again_whole, 0.0)
    last = weights_rank.product(tokens, shape.ffn / options.tensor, shape.hidden)
    recompute = again_whole * forward - np.where(np.asarray(shape.experts) > 1, 0.0, spared * last)
    recompute = recompute + np.where(selective, again, 0.0)
    sums = _tensor(shape, options, rates, reached, tokens)
    ahead, back = _exposed_sums(options, reached, sums, products, of_weights)
    last_sum = np.where(np.asarray(options.sequence_parallel) > 0, 1, 2) / (4 + 2 * shape.cross)
    forwards = 1 + again_whole - spared * last_sum
    ring = _context(shape, options, rates, reached, tokens)
    ring_ahead = beyond(reached, ring, attention)
    ring_back = beyond(reached, 2 * ring, attention_backward)
    return BlockSeconds(
        forward=forward,
        backward=backward,
        recompute=recompute,
        weight=of_weights,
        tensor=forwards * ahead + back,
        context=(1 + again_whole) * ring_ahead + ring_back,
        expert=_expert(shape, options, rates, reached, tokens) * (2 + again_whole - spared / 2),
        elapsed_backward=backward + back + ring_back,
    )


def _exposed_sums(
    options: Options, reached: Efficiencies, sums: Numbers, products: Numbers, weight: Numbers
) -> tuple[Numbers, Numbers]:
    """Seconds of tensor parallel sums that products do not hide, in a forward and in a backward.

    A ring passes tokens on in t parts, while the product of the part before runs: one has none beside it.
    Gradients of weights hide the sums of inputs' gradients, which are half of a backward's gathers and
    reduce-scatters, and all of its all-reduces; but not where they come later, to fill a pipeline's bubble.
    """
    weight = np.where(options.delays_weights, 0.0, weight)
    whole = np.where(np.asarray(options.sequence_parallel) > 0, 0.0, 1.0)
    chunks = (np.asarray(options.hides_sums) == Hides.CHUNKS) & (whole == 0)
    share = (options.tensor - 1) / options.tensor
    late = np.where(np.asarray(options.hides_sums) > Hides.NOTHING, (1 + whole) / 2, 0.0) * sums
    back = sums - late + beyond(reached, late, weight)
    return (
        np.where(chunks, beyond(reached, sums, share * products), sums),
        np.where(chunks, beyond(reached, sums, share * (products + weight)), back),
    )


def head_seconds(shape: Shape, options: Options, rates: Rates, reached: Efficiencies) -> Numbers:
    """Seconds of the head and the loss, forward and backward, for one microbatch."""
    rank = _Rank(rates.flops_per_s, rates.memory_Bps, reached, options.width)
    tokens = tokens_of(shape, options)
    width = shape.vocabulary / options.tensor
    times = 2 + np.asarray(shape.trained)
    return times * rank.product(tokens, shape.hidden, width) + tokens * width * _LOSS_BYTES / rank.memory_rate


def _products(rank: _Rank, shape: Shape, options: Options, tokens: Numbers) -> Numbers:
    t, hidden = options.tensor, shape.hidden
    around = _before_attention(rank, shape, t, tokens) + rank.product(tokens, shape.outputs / t, hidden)
    # With experts, each rank has some of them, and each token goes to some. Tensor parallel ranks have
    # different ones, too, where there are enough of them, or else parts of the same.
    sharing = np.where(np.asarray(options.expert) > 1, options.expert * t, 1.0)
    split = np.where(sharing > 1, np.clip(sharing / shape.experts, 1.0, t), t)
    at_once = np.maximum(1.0, shape.experts / sharing)
    share = np.where(np.asarray(shape.experts) > 1, rank.reached.grouped, 1.0)
    routed = tokens * options.expert * shape.experts_per_token / shape.experts
    into = rank.product(routed, hidden, shape.ffn * (1 + shape.gated) / split, share=share)
    sparse = at_once * (into + rank.product(routed, shape.ffn / split, hidden, share=share))
    sparse = sparse + _mlp(rank, shape, t, tokens, shape.shared_ffn)
    mlp = (1 - shape.dense) * sparse + shape.dense * _mlp(rank, shape, t, tokens, shape.dense_ffn)
    return (1 + shape.cross) * around + mlp


def _before_attention(rank: _Rank, shape: Shape, tensor: Numbers, tokens: Numbers) -> Numbers:
    """Queries, keys and values: one product, or by way of narrow vectors, whole on each tensor rank."""
    at_once = rank.product(tokens, shape.hidden, (shape.queries + shape.keys + shape.values) / tensor)
    narrow = np.maximum(shape.latent_width, 1)
    in_two = (
        rank.product(tokens, shape.hidden, narrow)
        + rank.product(tokens, shape.query_source, shape.queries / tensor)
        + rank.product(tokens, shape.key_source, shape.made_keys / tensor)
    )
    return np.where(np.asarray(shape.key_rank) > 0, in_two, at_once)


def _mlp(rank: _Rank, shape: Shape, tensor: Numbers, tokens: Numbers, width: Numbers) -> Numbers:
    """An MLP that all tokens take; 0 seconds where it has no width."""
    wide = np.maximum(width, 1)
    into = rank.product(tokens, shape.hidden, wide * (1 + shape.gated) / tensor)
    return np.where(np.asarray(width) > 0, into + rank.product(tokens, wide / tensor, shape.hidden), 0.0)


def _attention(rank: _Rank, shape: Shape, options: Options, tokens: Numbers) -> tuple[Numbers, Numbers]:
    reached = rank.reached
    scores = (1 + shape.cross) * tokens * shape.sequence * shape.heads / options.tensor
    flops = 2 * scores * (shape.head_width + shape.value_head)
    moved = scores * reached.scores_bytes
    apart = flops / (rank.peak * reached.scores) + moved / rank.memory_rate
    seen = flops * shape.attended / shape.sequence
    fused = seen / (rank.peak * reached.flash_forward)
    fused_backward = ATTENTION_BACKWARD * seen / (rank.peak * reached.flash_backward)
    factor = reached.attention_factor
    return (
        factor * np.where(options.flash > 0, fused, apart),
        factor * np.where(options.flash > 0, fused_backward, 2 * apart),
    )


def _elementwise(rank: _Rank, shape: Shape, options: Options, tokens: Numbers) -> Numbers:
    width = _ELEMENTWISE_WHOLE / _divided(options) + _ELEMENTWISE_SPLIT / options.tensor
    sparse = np.where(np.asarray(shape.experts) > 1, 1 - shape.dense, 0.0)
    routed = sparse * shape.experts_per_token * (_ROUTED * shape.hidden + _OF_EXPERT * shape.ffn)
    moved = rank.width * tokens * (shape.hidden * width + routed / options.tensor) * rank.reached.elementwise
    return moved / rank.memory_rate + _ELEMENTWISE_KERNELS * rank.reached.kernel_s


def _tensor(shape: Shape, options: Options, rates: Rates, reached: Efficiencies, tokens: Numbers) -> Numbers:
    """Two all-reduces, or as many pairs of gathers and reduce-scatters, in one direction."""
    once = Peers(rates, reached, options.tensor).ring_seconds(options.width * tokens * shape.hidden)
    return 2 * 2 * once * (1 + 0.5 * shape.cross)


def _context(shape: Shape, options: Options, rates: Rates, reached: Efficiencies, tokens: Numbers) -> Numbers:
    """Keys and values go round in a ring: seconds of a forward; in a backward, of twice as many bytes."""
    c = options.context
    rate = Peers(rates, reached, c, options.inner_stride).ring_rate()
    ring = (c - 1) * options.width * tokens * (shape.keys + shape.values) / options.tensor / rate
    return np.where(c > 1, ring, 0.0)


def _expert(shape: Shape, options: Options, rates: Rates, reached: Efficiencies, tokens: Numbers) -> Numbers:
    """Two exchanges of all with all, in one direction, in the blocks with experts.

    A tensor parallel rank sends its own part of the tokens, each as often as `Dispatch` tells.
    """
    e, peers = options.expert, Peers(rates, reached, options.expert, options.inner_stride)
    inside = peers.inside
    nodes = np.maximum(1.0, e / inside)
    num_bytes = options.width * tokens * shape.hidden / _divided(options)
    network = peers.network_rate * reached.exchange / rates.per_node
    to_ranks = e * _has_expert(shape, e)
    to_ranks = np.where(options.dispatch == Dispatch.EXPERT, shape.experts_per_token, to_ranks)
    by_nodes = options.dispatch == Dispatch.NODE
    to_nodes = np.where(by_nodes, nodes * _has_expert(shape, nodes), to_ranks)
    far = num_bytes * (nodes - 1) / nodes * to_nodes / network
    # What comes from other nodes goes over links where a rank passes it on.
    from_here = np.where(by_nodes, to_ranks, to_ranks / nodes)
    near = num_bytes * (inside - 1) / inside * from_here / (rates.link_Bps * reached.link)
    latency = np.where(nodes > 1, rates.network_latency_s, rates.link_latency_s) * np.log2(np.maximum(e, 1.0))
    once = np.maximum(far, near) + latency
    return np.where(e > 1, 2 * (1 - shape.dense) * once, 0.0)


def _has_expert(shape: Shape, parts: Numbers) -> Numbers:
    """How likely one of so many equal parts of the experts has one of a token, which lie in few groups."""
    groups, chosen = shape.expert_groups, shape.groups_per_token
    whole = 1 - (1 - 1 / parts) ** chosen
    of_group = (1 - np.minimum(groups / parts, 1.0)) ** (shape.experts_per_token / chosen)
    return np.where(parts < groups, whole, chosen / groups * (1 - of_group))

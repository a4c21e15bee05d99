"""Blocks of newer language models: latent attention, windows, shared experts, dense first blocks."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.catalogue import ARCHITECTURES, find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import (
    Dispatch,
    Hides,
    Offload,
    Options,
    Rates,
    Recompute,
    ScheduleKind,
    Shape,
    Sharded,
    calibration_of,
    rank_bytes,
    step_seconds,
)
from shardwright.costs.block import block_seconds

REACHED = calibration_of("H100", "megatron").efficiencies
RATES = Rates.of(parse_inventory("p5.48xlarge*8"))


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if not name.startswith("t5")])
def test_the_closed_forms_have_the_parameters_of_the_model(name):
    model = find_architecture(name)
    shape = Shape.of(model)
    tables = 1 if model.tied else 2
    positions = model.sequence * model.hidden if model.positions == "learned" else 0
    found = shape.layers * shape.block_parameters + tables * shape.embedding_parameters + positions
    # Without biases and norms.
    assert found == pytest.approx(model.num_parameters, rel=2e-3)


def _seen(tokens, window, causal):
    query, key = np.mgrid[:tokens, :tokens]
    return ((key <= query) | (not causal)) & ((query - key < window) | (window == 0))


@pytest.mark.parametrize("window", [64, 500, 2000])
def test_a_window_hides_what_it_should(window):
    """The mean of the keys of a query, counted in the mask of each kind of block."""
    tokens, share = 1000, 0.75
    model = replace(
        find_architecture("gpt-oss-20b"), sequence=tokens, window=window, windowed_layers=18, layers=24
    )
    counted = [_seen(tokens, width, causal=True).sum() / tokens for width in (0, window)]
    expected = (1 - share) * counted[0] + share * counted[1]
    assert Shape.of(model).attended == pytest.approx(expected, rel=1e-2)


def test_latent_attention_computes_what_its_products_say():
    """One block of DeepSeek-V3 on a machine without overheads: FLOPs over the rate, by hand."""
    ideal = replace(
        REACHED,
        matmul=1.0,
        matmul_factor=1.0,
        half_size=0.0,
        kernel_s=0.0,
        elementwise=0.0,
        flash_forward=1.0,
        attention_factor=1.0,
    )
    rates = replace(RATES, memory_Bps=1e30)
    model = replace(find_architecture("deepseek-v3"), layers=1, dense_layers=1)
    tokens, hidden, heads = 4096, 7168, 128
    found = block_seconds(Shape.of(model), Options(), rates, ideal).forward * rates.flops_per_s
    weights = hidden * 1536 + 1536 * heads * 192 + hidden * 576 + 512 * heads * 256 + heads * 128 * hidden
    weights += 3 * hidden * 18432
    attention = tokens * tokens / 2 * heads * 2 * (192 + 128)
    assert found == pytest.approx(2 * tokens * weights + attention, rel=1e-6)


def test_ranks_that_hold_different_experts_do_not_divide_their_states():
    """Expert 8 of 16 replicas: two ranks hold the same experts, and divide what belongs to them."""
    shape = Shape.of(find_architecture("mixtral-8x7b"))
    options = Options(data=16.0, shard=16.0, sharded=int(Sharded.OPTIMIZER), expert=8.0)
    experts = shape.layers * shape.experts * shape.mlp_parameters
    others = shape.layers * shape.block_parameters - experts + 2 * shape.embedding_parameters
    found = rank_bytes(shape, options).optimizer
    assert found == pytest.approx(12 * (experts / 8 / 2 + others / 16))
    # Of all ranks together, it is the state of the model, and no less.
    assert 16 * found == pytest.approx(12 * (experts + others))
    apart, together = (
        step_seconds(shape, replace(options, expert=e), RATES, REACHED).update for e in (8.0, 1.0)
    )
    assert apart == pytest.approx(together, rel=1e-2)


def test_stages_behind_the_first_have_no_block_without_experts():
    """Sixty-one blocks, of which the first three are dense: of two stages, the last has experts in all."""
    shape = Shape.of(find_architecture("deepseek-v3"))
    options = Options(pipeline=2.0, microbatches=4.0)
    sparse = shape.attention_parameters + shape.latent_parameters + shape.shared_parameters
    sparse += shape.experts * shape.mlp_parameters
    assert rank_bytes(shape, options).parameters / 2 == pytest.approx(
        31 * sparse + shape.embedding_parameters
    )


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b"])
def test_an_exchange_of_experts_takes_as_long_whatever_the_tensor_degree(name):
    """A tensor parallel rank sends its own tokens, and the network of a node is one."""
    shape, seconds = Shape.of(find_architecture(name)), []
    for tensor in (1, 2, 4, 8):
        # As many tokens a step: the fewer replicas, the more microbatches.
        options = Options(
            tensor=tensor, expert=64 // tensor, data=128 // tensor, microbatches=tensor, sequence_parallel=1
        )
        seconds.append(tensor * float(block_seconds(shape, options, RATES, REACHED).expert))
    assert max(seconds) < 1.3 * min(seconds)


def test_a_token_goes_once_to_a_node():
    """Two nodes: half of the tokens of eight experts each lie on the other, and nearly all go there once."""
    shape, reached = (
        Shape.of(find_architecture("qwen3-235b-a22b")),
        replace(REACHED, exchange=1.0, link=1e9, contention=0.0),
    )
    options = Options(expert=16, sequence_parallel=1)
    found = float(block_seconds(shape, options, RATES, reached).expert)
    sent = 4096 * 4096 * 2 * (1 - 0.5**8)
    latency = 4 * 2e-5 * np.log2(16)
    assert found == pytest.approx(4 * sent / (400e9 / 8) + latency, rel=1e-3)


def test_a_token_goes_once_to_whom_the_dispatcher_sends_it():
    """Eight of 128 experts, over eight ranks of a node and over sixteen of two."""
    shape = replace(Shape.of(find_architecture("qwen3-235b-a22b")), expert_groups=1.0)
    rates = replace(RATES, link_latency_s=0.0, network_latency_s=0.0)
    num_bytes = 4 * 2 * 4096 * shape.hidden  # there and back, in a forward and in a backward

    def seconds(expert, dispatch, model=shape):
        # Of exchanges inside of a node and over the network, which run at the same time, one counts.
        link = 0.5 if expert == 8 else 1e9
        reached = replace(REACHED, exchange=1.0, link=link, contention=0.0)
        options = Options(expert=expert, sequence_parallel=1, dispatch=int(dispatch))
        return float(block_seconds(model, options, rates, reached).expert)

    inside, across = 0.5 * rates.link_Bps, rates.network_Bps / 8
    ranks = 8 * (1 - (7 / 8) ** 8)
    assert seconds(8, Dispatch.EXPERT) == pytest.approx(num_bytes * 8 * 7 / 8 / inside)
    assert seconds(8, Dispatch.RANK) == pytest.approx(num_bytes * ranks * 7 / 8 / inside)
    assert seconds(8, Dispatch.NODE) == seconds(8, Dispatch.RANK)
    ranks = 16 * (1 - (15 / 16) ** 8)
    assert seconds(16, Dispatch.EXPERT) == pytest.approx(num_bytes * 8 / 2 / across)
    assert seconds(16, Dispatch.RANK) == pytest.approx(num_bytes * ranks / 2 / across)
    assert seconds(16, Dispatch.NODE) == pytest.approx(num_bytes * (1 - 0.5**8) / across)
    # Eight experts in a row are those of one rank, and of one node.
    in_a_row = replace(shape, expert_groups=16.0, groups_per_token=1.0)
    assert seconds(8, Dispatch.RANK, in_a_row) == pytest.approx(num_bytes * 7 / 8 / inside)
    assert seconds(16, Dispatch.NODE, in_a_row) == pytest.approx(num_bytes / 2 / across)


def test_links_carry_what_is_of_their_node_or_passed_on_in_it():
    """Sixteen ranks of two nodes: a half of a token's ranks are in its own, if it goes to each of them."""
    shape = Shape.of(find_architecture("qwen3-235b-a22b"))
    rates = replace(RATES, network_Bps=1e15, network_latency_s=0.0)
    reached = replace(REACHED, exchange=1.0, link=0.5, contention=0.0)

    def seconds(dispatch):
        options = Options(expert=16, sequence_parallel=1, dispatch=int(dispatch))
        return float(block_seconds(shape, options, rates, reached).expert)

    once = 4 * 2 * 4096 * shape.hidden * 7 / 8 / (0.5 * rates.link_Bps)
    ranks = 16 * (1 - (15 / 16) ** 8)
    assert seconds(Dispatch.NODE) == pytest.approx(once * ranks)
    assert seconds(Dispatch.RANK) == pytest.approx(once * ranks / 2)
    assert seconds(Dispatch.EXPERT) == pytest.approx(once * 8 / 2)


def test_groups_of_experts_bound_the_nodes_that_a_token_goes_to():
    """DeepSeek-V3: eight experts, in four of eight groups, one group a node."""
    model = find_architecture("deepseek-v3")
    shape = Shape.of(model)
    assert (shape.expert_groups, shape.groups_per_token) == (8, 4)
    rates = replace(RATES, network_latency_s=0.0)
    reached = replace(REACHED, exchange=1.0, link=1e9, contention=0.0)
    found = block_seconds(shape, Options(expert=64, sequence_parallel=1), rates, reached).expert
    sent = 4096 * 7168 * 2 * 7 * (4 / 8) * (1 - shape.dense)
    assert float(found) == pytest.approx(4 * sent / (rates.network_Bps / 8))


def _exposed(hides, *, exposed=0.2, reached=REACHED, **ways):
    options = replace(Options(tensor=8.0, sequence_parallel=1, hides_sums=int(hides)), **ways)
    shape = Shape.of(find_architecture("llama3-70b"))
    return block_seconds(shape, options, RATES, replace(reached, exposed=exposed))


@pytest.mark.parametrize("link", [0.05, 0.8])
def test_products_hide_sums_of_tensor_parallel_ranks(link):
    """What is exposed of them: those that products are too short for, and a share at least."""
    reached = replace(REACHED, link=link)
    plain = _exposed(Hides.NOTHING, reached=reached)
    assert float(_exposed(Hides.CHUNKS, exposed=1.0, reached=reached).tensor) == pytest.approx(
        float(plain.tensor)
    )
    once, products = float(plain.tensor) / 2, float(plain.weight)

    def beyond(seconds, beside):
        return max(0.2 * seconds, seconds - beside)

    backward = _exposed(Hides.BACKWARD, reached=reached)
    assert float(backward.tensor) == pytest.approx(1.5 * once + beyond(once / 2, products))
    chunks = _exposed(Hides.CHUNKS, reached=reached)
    expected = beyond(once, 7 / 8 * products) + beyond(once, 7 / 8 * 2 * products)
    assert float(chunks.tensor) == pytest.approx(expected)
    # Whole sums are not in parts; those of the backward wait for nothing.
    whole = _exposed(Hides.CHUNKS, sequence_parallel=0, reached=reached)
    assert float(whole.tensor) == pytest.approx(once + beyond(once, products))
    # Gradients of weights that fill a pipeline's bubble come too late.
    late = {"pipeline": 4.0, "schedule": int(ScheduleKind.ZB_H1), "reached": reached}
    assert float(_exposed(Hides.BACKWARD, **late).tensor) == pytest.approx(float(plain.tensor))
    both = 2 * beyond(once, 7 / 8 * products)
    assert float(_exposed(Hides.CHUNKS, **late).tensor) == pytest.approx(both)
    assert float(_exposed(Hides.CHUNKS, **late | {"pipeline": 1.0}).tensor) == pytest.approx(expected)
    # No more than all of them is exposed.
    most = float(_exposed(Hides.CHUNKS, exposed=3.0, reached=reached).tensor)
    assert most == pytest.approx(float(plain.tensor))


def test_a_second_of_computing_hides_one_of_traffic_whosever_that_is():
    """Gathers, transfers to the host and hops that each pass beside all else are too long together."""
    options = Options(
        pipeline=4.0,
        data=16.0,
        shard=16.0,
        sharded=int(Sharded.PARAMETERS),
        microbatches=8.0,
        offload=int(Offload.ACTIVATIONS),
    )
    shape, reached = Shape.of(find_architecture("llama3-8b")), replace(REACHED, exposed=0.0)
    rates = replace(RATES, network_Bps=5e10, hop_Bps=2e10, host_Bps=2e11)
    names = ("gather", "reduce_scatter", "offload", "point_to_point")
    found = step_seconds(shape, options, rates, reached)
    exposed = sum(float(getattr(found, name)) for name in names)
    # Without products to hide behind, all of it.
    endless = replace(rates, flops_per_s=1e30, memory_Bps=1e30)
    bare = step_seconds(shape, options, endless, replace(reached, kernel_s=0.0))
    traffic = sum(float(getattr(bare, name)) for name in names) + float(bare.bubble)
    beside = float(found.compute + found.recompute + found.bubble)
    assert 0 < exposed == pytest.approx(traffic - beside, rel=1e-3)
    assert max(float(getattr(bare, name)) for name in names) < beside
    # Sums over replicas have what these leave of the last backward: nothing here.
    summed = step_seconds(shape, replace(options, data=32.0), rates, reached)
    alone = step_seconds(shape, replace(options, data=32.0), endless, replace(reached, kernel_s=0.0))
    assert float(summed.all_reduce) == pytest.approx(float(alone.all_reduce), rel=1e-6)


def test_recomputation_may_end_before_the_last_product():
    """That of a dense MLP, one gather or reduce-scatter of four, and an exchange of two."""
    ways = Options(tensor=2.0, sequence_parallel=1, recompute=int(Recompute.FULL), hides_sums=0)
    dense = Shape.of(find_architecture("llama3-8b"))
    whole, early = (
        block_seconds(dense, replace(ways, stops_early=stops), RATES, REACHED) for stops in (0, 1)
    )
    flops = 2 * 8192 * dense.hidden * dense.ffn / 2
    assert 1.0 < float(whole.recompute - early.recompute) * 989e12 * REACHED.matmul / flops < 1.3
    assert float(early.tensor) == pytest.approx(float(whole.tensor) * 2.75 / 3)
    # The all-reduce behind that product is one of two.
    apart = replace(ways, sequence_parallel=0)
    sums = [
        float(block_seconds(dense, replace(apart, stops_early=stops), RATES, REACHED).tensor)
        for stops in (0, 1)
    ]
    assert sums[1] == pytest.approx(sums[0] * 2.5 / 3)
    sparse = Shape.of(find_architecture("qwen3-235b-a22b"))
    ways = replace(ways, expert=8.0)
    whole, early = (
        block_seconds(sparse, replace(ways, stops_early=stops), RATES, REACHED) for stops in (0, 1)
    )
    assert float(early.expert) == pytest.approx(float(whole.expert) * 2.5 / 3)
    assert float(early.recompute) == float(whole.recompute)


def test_products_in_8_bits_are_those_of_blocks_weights():
    shape = Shape.of(find_architecture("llama3-8b"))
    wide, narrow = (block_seconds(shape, Options(float8=float8), RATES, REACHED) for float8 in (0, 1))
    assert 0.5 * wide.weight < narrow.weight < 0.75 * wide.weight
    # Attention and what is between products stay as they are.
    assert narrow.forward - narrow.weight == pytest.approx(wide.forward - wide.weight)

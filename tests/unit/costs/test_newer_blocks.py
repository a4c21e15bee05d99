"""Blocks of newer language models: latent attention, windows, shared experts, dense first blocks."""

from dataclasses import replace

import numpy as np
import pytest

from shardwright.catalogue import ARCHITECTURES, find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import Options, Rates, Shape, Sharded, calibration_of, rank_bytes, step_seconds
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

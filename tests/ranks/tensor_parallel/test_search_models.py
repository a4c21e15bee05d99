"""The search finds what people wrote down for these models, and more; and what it finds is exact."""

import pytest
import torch
from language_models import MODELS
from searching import LAYERS, VARIANTS, model_of, searched, units
from test_divided_models import compare

from choices import in_every_run, in_sweep, some_combinations
from model_units import loss_alone
from shardwright.placement import WHOLE, Cut
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search import Unit, dry_run, find_placements

# Of a layer: the dimension that is cut, and segments in which it is.
COLUMNS_THEN_ROWS = {
    "llama": {
        **dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], (0, 1)),
        **dict.fromkeys(["mlp.gate_proj", "mlp.up_proj"], (0, 1)),
        **dict.fromkeys(["self_attn.o_proj", "mlp.down_proj"], (1, 1)),
    },
    "mixtral": {
        **dict.fromkeys(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], (0, 1)),
        "self_attn.o_proj": (1, 1),
        "mlp.experts.gate_up_proj": (1, 2),
        "mlp.experts.down_proj": (2, 1),
    },
    "gpt2": {"attn.c_attn": (1, 3), "attn.c_proj": (0, 1), "mlp.c_fc": (1, 1), "mlp.c_proj": (0, 1)},
    "bert": {
        **dict.fromkeys([f"attention.self.{each}" for each in ("query", "key", "value")], (0, 1)),
        "intermediate.dense": (0, 1),
        **dict.fromkeys(["attention.output.dense", "output.dense"], (1, 1)),
    },
    "gpt_neox": {
        **dict.fromkeys(["attention.query_key_value", "mlp.dense_h_to_4h"], (0, 1)),
        **dict.fromkeys(["attention.dense", "mlp.dense_4h_to_h"], (1, 1)),
    },
}
T5_ATTENTION = {**dict.fromkeys("qkv", (0, 1)), "o": (1, 1)}
T5_DENSE = {"DenseReluDense.wi": (0, 1), "DenseReluDense.wo": (1, 1)}


def expected(name, prefix):
    """Placements of a layer by the names of its matrices."""
    if name != "t5":
        return COLUMNS_THEN_ROWS[name]
    attention = ["layer.0.SelfAttention", *(["layer.1.EncDecAttention"] * prefix.startswith("decoder"))]
    found = {f"{each}.{key}": value for each in attention for key, value in T5_ATTENTION.items()}
    return found | {f"layer.{len(attention)}.{key}": value for key, value in T5_DENSE.items()}


def of_unit(found, name):
    """Placements by the names within a unit; those of the rest without those of the layers."""
    inner = tuple(f"{each}." for layers in LAYERS.values() for each in layers)
    own = found.of_unit(name)
    return own if name else {key: each for key, each in own.items() if not key.startswith(inner)}


@pytest.mark.parametrize("name", in_every_run(LAYERS, ["llama", "gpt2", "t5"]))
def test_columns_then_rows(name):
    found = searched(name, 2)
    for prefix in LAYERS[name]:
        for index in range(2):
            placements = found.of_unit(f"{prefix}.{index}")
            for key, (dim, segments) in expected(name, prefix).items():
                cut = placements.get(f"{key}.weight", placements.get(key, WHOLE))
                assert isinstance(cut, Cut), key
                assert (cut.dim, len(cut.runs)) == (dim, 2 * segments), (key, str(cut))
                assert cut.length(0) == cut.length(1)
    assert found.divided > 0.9


@pytest.mark.parametrize(("name", "num_ranks"), some_combinations(list(LAYERS), [3, 4]))
def test_half_of_the_parameters_are_divided_over_more_ranks(name, num_ranks):
    found = searched(name, num_ranks)
    assert found.divided >= 0.5
    assert found.price.total_s < found.whole_price.total_s
    if num_ranks == 4 and name != "llama" and name != "mixtral":  # which have 2 key heads
        prefix = LAYERS[name][0]
        layer = found.of_unit(f"{prefix}.0")
        for key, (dim, _) in expected(name, prefix).items():
            assert layer[f"{key}.weight"].dim == dim, key


@pytest.mark.parametrize(("name", "num_ranks"), some_combinations(list(LAYERS), [2, 4]))
def test_price_is_that_of_what_the_step_sends(name, num_ranks):
    found, prices, seconds = searched(name, num_ranks), Prices(), 0.0
    for unit_name, unit in units(name).items():
        traffic = dry_run(unit, of_unit(found, unit_name), rank=0, num_ranks=num_ranks).traffic
        seconds += traffic.calls.total() * prices.latency_s
        seconds += traffic.sent_bytes.total() / prices.bandwidth_Bps
    assert found.price.exchange_s == pytest.approx(seconds, rel=1e-9)


def test_tied_embedding_is_cut_by_words_and_logits_are_not_gathered():
    sizes = {"vocab_size": 4096, "n_embd": 64}
    found = searched("gpt2", 2, **sizes)
    assert found.placements["transformer.wte.weight"] == Cut.even(0, 4096, num_ranks=2)
    group = dry_run(units("gpt2", **sizes)[""], of_unit(found, ""), rank=0, num_ranks=2)
    logits = 4 * 32 * 4096 * 4
    assert group.traffic.sent_bytes.total() < logits / 4


def test_fewer_key_heads_than_ranks():
    """Queries are cut by heads all the same; keys are not cut within a head."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8}
    found = searched("llama", 4, **sizes)
    layer = found.of_unit("model.layers.0")
    assert layer["self_attn.q_proj.weight"] == Cut.even(0, 256, num_ranks=4)
    assert layer["self_attn.o_proj.weight"] == Cut.even(1, 256, num_ranks=4)
    for key in ("self_attn.k_proj.weight", "self_attn.v_proj.weight"):
        cut = layer.get(key, WHOLE)
        assert cut == WHOLE or cut.dim == 1 or all(run.length % 32 == 0 for run in cut.runs)


@pytest.mark.parametrize(
    ("num_ranks", "names"),
    [
        (2, ["gpt2 with dropout"]),
        in_sweep(3, list(VARIANTS)),
        in_sweep(4, ["llama", "t5", "mixtral", *VARIANTS]),
    ],
    ids=str,
)
def test_key_heads_fewer_than_ranks_uneven_heads_and_dropout(num_ranks, names):
    """Also twice the same: dropout draws as one process does, whatever the ranks."""

    def on_rank():
        once, again = (
            {
                name: compare(name, lambda *_, name=name: searched(name, num_ranks).placements)
                for name in names
            }
            for _ in range(2)
        )
        assert once == again
        return once

    for errors in run_ranks(on_rank, num_ranks, timeout_s=240):
        for name in names:
            loss, gradient, worst, held, _ = errors[name]
            assert loss < 1e-12, name
            assert gradient < 1e-12, f"{name}: {worst}"
            assert held < 0.75, name


def test_the_model_stays_as_it_is():
    model = model_of("gpt2")
    before = dict(model.named_parameters())
    ids = torch.zeros(4, 16, dtype=torch.int64)
    whole = Unit(model, kwargs={"input_ids": ids, "labels": ids}, run=loss_alone)
    found = find_placements(whole, num_ranks=2)
    after = dict(model.named_parameters())
    assert all(after[name] is each and each.grad is None for name, each in before.items())
    # A whole model as one unit: its layers are alike all the same.
    layers = [found.placements[f"transformer.h.{index}.mlp.c_fc.weight"] for index in range(2)]
    assert layers == [Cut.even(1, MODELS["gpt2"][2]["n_embd"] * 4, num_ranks=2)] * 2

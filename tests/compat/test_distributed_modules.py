"""The distributed modules of ``smp.nn`` compute what their documentation's plain versions compute."""

import pytest
import torch
from torch import nn

import smdistributed.modelparallel.torch as smp
from compat.reference_layers import PlainAttention, PlainLayer, PlainLMHead, PlainTransformer
from shardwright.errors import UsageError
from shardwright.torch.units.tensor_division import pinned_placements
from smdistributed.modelparallel.torch.nn.flash_attention import alibi_slopes

HIDDEN, HEADS, SIZE, INTERMEDIATE, LENGTH = 12, 3, 4, 20, 7
SIZES = {"num_attention_heads": HEADS, "attention_head_size": SIZE, "hidden_size": HIDDEN}
NO_DROPOUT = {"attention_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}
PLAIN = {"heads": HEADS, "size": SIZE, "hidden": HIDDEN}
NORMS = [(False, True), (True, False), (True, True)]


@pytest.fixture(autouse=True)
def _in_64_bits():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(before)


def states(length=LENGTH):
    return torch.randn(2, length, HIDDEN, requires_grad=True)


def mask(length=LENGTH):
    """Hides the last position of the second sample."""
    found = torch.zeros(2, 1, 1, length)
    found[1, ..., -1] = -1e9
    return found


def compare(module, plain, call, plain_call):
    """Results and gradients of both, with the same weights."""
    module.load_state_dict(plain.state_dict())
    wanted, found = plain_call(plain), call(module)
    torch.testing.assert_close(found, wanted)
    direction = torch.randn_like(wanted)
    wanted.backward(direction)
    found.backward(direction)
    gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, msg=name)


LAYER = {**SIZES, **NO_DROPOUT, "intermediate_size": INTERMEDIATE}
PLAIN_LAYER = {**PLAIN, "intermediate": INTERMEDIATE}


@pytest.mark.parametrize("cross", [False, True])
@pytest.mark.parametrize(("pre", "post"), NORMS)
def test_layers_take_and_return_tuples(pre, post, cross):
    module = smp.nn.DistributedTransformerLayer(
        **LAYER,
        causal_mask_size=LENGTH,
        add_cross_attention=cross,
        pre_layernorm=pre,
        post_layernorm=post,
    )
    plain = PlainLayer(**PLAIN_LAYER, pre=pre, post=post, causal=True, cross=cross)
    hidden, other = states(), states(5)
    inputs = (hidden, other, mask(), mask(5)) if cross else (hidden, mask())
    plain_inputs = (hidden, mask(), other, mask(5)) if cross else (hidden, mask())
    result = module(inputs)
    assert isinstance(result, tuple)
    assert all(found is given for found, given in zip(result[1:], inputs[1:], strict=True))
    compare(module, plain, lambda m: m(inputs)[0], lambda m: m(*plain_inputs))
    assert torch.equal(module(*inputs)[0], module(inputs)[0])


def test_a_transformer_is_a_sequence_of_layers():
    module = smp.nn.DistributedTransformer(3, **LAYER, activation="relu")
    assert isinstance(module.seq_layers, nn.Sequential)
    assert {type(layer) for layer in module.seq_layers} == {smp.nn.DistributedTransformerLayer}
    plain = PlainTransformer(
        3, **PLAIN_LAYER, pre=False, post=True, causal=False, cross=False, activation="relu"
    )
    hidden = states()
    compare(module, plain, lambda m: m((hidden, mask()))[0], lambda m: m(hidden, mask()))
    assert torch.equal(module(hidden), module((hidden, None))[0])  # a tensor alone, too


def test_a_language_model():
    module = smp.nn.DistributedTransformerLMHead(
        2, **LAYER, vocab_size=17, num_positions=9, num_token_types=2, causal_mask_size=LENGTH
    )
    plain = PlainLMHead(
        vocab=17,
        positions=9,
        types=2,
        num_layers=2,
        **PLAIN_LAYER,
        pre=False,
        post=True,
        causal=True,
        cross=False,
    )
    ids, types = torch.randint(0, 17, (2, LENGTH)), torch.randint(0, 2, (2, LENGTH))
    masked = torch.zeros(2, LENGTH, dtype=torch.long)
    masked[0, -2:] = 1
    assert module.lm_head.weight is module.word_embedding.weight
    compare(
        module,
        plain,
        lambda m: m((ids, masked, types, None, ids))[0],
        lambda m: m(ids, masked, types, ids)[0],
    )
    torch.testing.assert_close(module((ids, masked, types, None, None)), plain(ids, masked, types, ids)[1])
    headless = smp.nn.DistributedTransformerLMHead(1, **LAYER, vocab_size=17, add_lm_head=False)
    assert headless((ids, None, None, None, None)).shape == (2, LENGTH, HIDDEN)


def attention_of(**options):
    return smp.nn.DistributedAttentionLayer(
        **SIZES, **NO_DROPOUT, pre_layernorm=True, post_layernorm=False, **options
    )


@pytest.mark.parametrize("causal", [None, LENGTH])
def test_alibi_adds_a_bias_that_falls_with_the_distance(causal):
    module = attention_of(use_alibi=True, alibi_bias_max=4, causal_mask_size=causal)
    plain = PlainAttention(**PLAIN, pre=True, post=False, causal=causal is not None)
    module.load_state_dict(plain.state_dict())
    distance = (torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)).abs().double()
    bias = -distance * torch.tensor(alibi_slopes(HEADS, 4))[:, None, None]
    hidden = states()
    torch.testing.assert_close(module((hidden, mask())), plain(hidden, mask(), bias=bias))
    torch.testing.assert_close(module((hidden, None)), plain(hidden, 0.0, bias=bias))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(module((hidden, None)), plain(hidden, 0.0))


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"scale_attention_scores": False}, SIZE**0.5),
        ({"scale_attn_by_layer_idx": True, "layer_idx": 3}, 0.25),
    ],
)
def test_scores_are_scaled(options, factor):
    module = attention_of(**options)
    plain = PlainAttention(**PLAIN, pre=True, post=False)
    module.load_state_dict(plain.state_dict())
    with torch.no_grad():
        plain.query.weight *= factor
        plain.query.bias *= factor
    hidden = states()
    torch.testing.assert_close(module((hidden, mask())), plain(hidden, mask()))


def test_a_window_ends_at_its_own_position():
    module = attention_of(attention_window=2, causal_mask_size=LENGTH)
    plain = PlainAttention(**PLAIN, pre=True, post=False, causal=True)
    module.load_state_dict(plain.state_dict())
    hidden = states()
    beyond = torch.ones(LENGTH, LENGTH).tril(-2).bool()
    bias = torch.zeros(LENGTH, LENGTH).masked_fill(beyond, -1e9)
    torch.testing.assert_close(module((hidden, None)), plain(hidden, 0.0, bias=bias))
    with pytest.raises(UsageError, match="attention_window needs causal_mask_size"):
        attention_of(attention_window=2)


def test_first_weights():
    normal = smp.nn.DistributedTransformerLayer(
        **LAYER | {"hidden_size": 64, "intermediate_size": 256},
        use_normal_initialization=True,
        initializer_range=0.25,
    )
    weights = [normal.attention.query, normal.attention.dense, normal.output.dense1, normal.output.dense2]
    assert all(0.2 < float(linear.weight.detach().std()) < 0.3 for linear in weights)
    assert all(float(linear.bias.detach().abs().max()) == 0 for linear in weights)
    zero = smp.nn.DistributedTransformerLMHead(1, **LAYER, vocab_size=5, zero_init=True)
    dims = {p.dim() for p in zero.parameters() if float(p.detach().abs().max()) > 0}
    assert dims == {1}  # normalisations
    torch.manual_seed(3)
    default = smp.nn.DistributedLinear(4, 4)
    torch.manual_seed(3)
    assert torch.equal(default.weight, nn.Linear(4, 4).weight)


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_each_rank_has_heads_and_intermediate_channels(num_ranks):
    layer = smp.nn.DistributedTransformerLayer(**LAYER, add_cross_attention=True)
    found = pinned_placements(layer, num_ranks=num_ranks)
    assert set(found) == {name for name, _ in layer.named_parameters()}
    cuts = {name: str(placement) for name, placement in found.items()}
    heads = {2: "(r0:4 r1:8)", 3: "(r0:4 r1:4 r2:4)"}.get(num_ranks)  # none with more ranks than heads
    for part in ("attention", "cross_attention"):
        for name in ("query.weight", "query.bias", "key.weight", "value.bias"):
            assert cuts[f"{part}.{name}"] == (f"cut 0 {heads}" if heads else "whole")
        assert cuts[f"{part}.dense.weight"] == (f"cut 1 {heads}" if heads else "whole")
        assert cuts[f"{part}.dense.bias"] == cuts[f"{part}.layernorm.weight"] == "whole"
    assert cuts["output.dense1.weight"].startswith("cut 0")
    assert cuts["output.dense1.bias"].startswith("cut 0")
    assert cuts["output.dense2.weight"].startswith("cut 1")
    assert cuts["output.dense2.bias"] == "whole"


def test_small_modules_are_cut_as_documented():
    assert (
        str(pinned_placements(smp.nn.DistributedLinear(6, 4), num_ranks=2)["weight"]) == "cut 1 (r0:3 r1:3)"
    )
    embedding = smp.nn.DistributedEmbedding(5, 6)
    assert str(pinned_placements(embedding, num_ranks=2)["weight"]) == "cut 1 (r0:3 r1:3)"
    for distributed, expected in ((True, "cut 0 (r0:8 r1:9)"), (False, "whole")):
        model = smp.nn.DistributedTransformerLMHead(
            1, **LAYER, vocab_size=17, distribute_embedding=distributed
        )
        found = pinned_placements(model, num_ranks=2)
        assert str(found["word_embedding.weight"]) == expected
        assert found["lm_head.weight"] == found["word_embedding.weight"]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: smp.nn.DistributedTransformerLayer(pre_layernorm=False, post_layernorm=False),
            "must be True",
        ),
        (lambda: smp.nn.DistributedTransformerOutputLayer(activation="tanh"), "one of gelu, relu"),
        (lambda: smp.nn.DistributedAttentionLayer(num_heads=2), "has no argument num_heads"),
        (lambda: attention_of(scale_attn_by_layer_idx=True), "layer_idx is not given"),
        (lambda: attention_of()(states(), mask(), None, None), r"takes a tuple \(hidden_states"),
        (lambda: attention_of()(()), r"was called with \(\)"),
    ],
)
def test_misuse_is_refused(make, text):
    with pytest.raises(UsageError, match=text):
        make()

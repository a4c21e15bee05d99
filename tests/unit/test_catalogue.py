"""Architectures have the parameters that their models have."""

import pytest
import torch

from shardwright.catalogue import ARCHITECTURES, find_architecture, from_hugging_face
from shardwright.errors import ConfigError, UsageError

transformers = pytest.importorskip("transformers")


def num_parameters(config):
    with torch.device("meta"):
        kind = transformers.AutoModelForCausalLM
        if config.model_type == "t5":
            kind = transformers.AutoModelForSeq2SeqLM
        model = kind.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


SMALL = {
    "gpt2": transformers.GPT2Config(n_embd=48, n_layer=3, n_head=4, vocab_size=100, n_positions=32),
    "gptj": transformers.GPTJConfig(
        n_embd=48, n_layer=3, n_head=4, vocab_size=100, n_positions=32, rotary_dim=4
    ),
    "gpt_neox": transformers.GPTNeoXConfig(
        hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192, vocab_size=100
    ),
    "bloom": transformers.BloomConfig(hidden_size=48, n_layer=3, n_head=4, vocab_size=100),
    "opt": transformers.OPTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        ffn_dim=96,
        vocab_size=100,
        max_position_embeddings=30,
        word_embed_proj_dim=48,
    ),
    "llama": transformers.LlamaConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        vocab_size=100,
    ),
    "mistral": transformers.MistralConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        vocab_size=100,
    ),
    "qwen2": transformers.Qwen2Config(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        vocab_size=100,
        tie_word_embeddings=True,
    ),
    "mixtral": transformers.MixtralConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=80,
        vocab_size=100,
        num_local_experts=4,
    ),
    "t5": transformers.T5Config(d_model=48, d_kv=8, num_layers=3, num_heads=4, d_ff=96, vocab_size=100),
    "t5 gated": transformers.T5Config(
        d_model=48,
        d_kv=8,
        num_layers=2,
        num_decoder_layers=3,
        num_heads=4,
        d_ff=96,
        vocab_size=100,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    ),
}


@pytest.mark.parametrize("kind", SMALL)
def test_parameters_of_a_configuration(kind):
    config = SMALL[kind]
    assert from_hugging_face(config.to_dict()).num_parameters == num_parameters(config)


NAMED = {
    "gpt2-1.5b": transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "gpt-neox-20b": transformers.GPTNeoXConfig(),
    "gpt-j-6b": transformers.GPTJConfig(),
    "bloom-176b": transformers.BloomConfig(hidden_size=14336, n_layer=70, n_head=112, vocab_size=250880),
    "llama3-70b": transformers.LlamaConfig(
        hidden_size=8192,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        intermediate_size=28672,
        vocab_size=128256,
    ),
    "mixtral-8x7b": transformers.MixtralConfig(),
    "t5-11b": transformers.T5Config(
        d_model=1024, d_kv=128, num_layers=24, num_heads=128, d_ff=65536, vocab_size=32128
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_parameters_of_a_name(name):
    assert find_architecture(name).num_parameters == num_parameters(NAMED[name])


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("t5-3b", 2.85),
        ("gpt-neox-13b", 13.1),
        ("gpt-neox-100b", 102.7),
        ("bloom-50b", 52),
        ("gpt3-175b", 174.6),
        ("llama3-8b", 8.03),
        ("llama3-405b", 405.9),
    ],
)
def test_size_of_a_name(name, billions):
    assert ARCHITECTURES[name].num_parameters / 1e9 == pytest.approx(billions, rel=6e-3)


def test_a_name_that_nobody_knows():
    with pytest.raises(UsageError, match=r"there is no architecture 'lama 3 8b'; did you mean llama3-8b"):
        find_architecture("lama 3 8b")
    with pytest.raises(UsageError, match=r"known are gpt2-1\.5b"):
        find_architecture("qqqq")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', but only bloom, gpt2"),
        ({"n_layer": None}, "n_layer is missing"),
        ({"n_layer": -1}, "n_layer is -1, but it must be a whole number from 1"),
        ({"n_embd": True}, "n_embd is True"),
    ],
)
def test_configurations_that_cannot_be_read(change, message):
    with pytest.raises(ConfigError, match=message):
        from_hugging_face(SMALL["gpt2"].to_dict() | change)

"""Architectures have the parameters that their models have."""

import pytest
import torch

from shardwright.catalogue import find_architecture, from_hugging_face
from shardwright.errors import ConfigError, UsageError

transformers = pytest.importorskip("transformers")


KINDS = {"t5": transformers.AutoModelForSeq2SeqLM}


def num_parameters(config):
    with torch.device("meta"):
        kind = KINDS.get(config.model_type, transformers.AutoModelForCausalLM)
        model = kind.from_config(config)
    return sum(parameter.numel() for parameter in model.parameters())


GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 4, "vocab_size": 100, "n_positions": 32}
SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 80}
NARROW = {"kv_lora_rank": 12, "qk_rope_head_dim": 6, "qk_nope_head_dim": 10, "v_head_dim": 8}
DEEPSEEK = {
    **LLAMA,
    **NARROW,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "n_group": 2,
    "topk_group": 1,
}
T5 = {"d_model": 48, "d_kv": 8, "num_heads": 4, "d_ff": 96, "vocab_size": 100}
SMALL = {
    "gpt2": transformers.GPT2Config(**GPT2),
    "gptj": transformers.GPTJConfig(**GPT2, rotary_dim=4),
    "gpt_neox": transformers.GPTNeoXConfig(**SIZES, intermediate_size=192),
    "bloom": transformers.BloomConfig(hidden_size=48, n_layer=3, n_head=4, vocab_size=100),
    "opt": transformers.OPTConfig(**SIZES, ffn_dim=96, max_position_embeddings=30, word_embed_proj_dim=48),
    "llama": transformers.LlamaConfig(**LLAMA),
    "mistral": transformers.MistralConfig(**LLAMA),
    "qwen2": transformers.Qwen2Config(**LLAMA, tie_word_embeddings=True),
    "mixtral": transformers.MixtralConfig(**LLAMA, num_local_experts=4),
    "qwen3": transformers.Qwen3Config(**LLAMA, head_dim=16),
    "qwen3_moe": transformers.Qwen3MoeConfig(
        **LLAMA, head_dim=16, moe_intermediate_size=24, num_experts=6, num_experts_per_tok=2
    ),
    "deepseek_v3": transformers.DeepseekV3Config(
        **DEEPSEEK | {"num_hidden_layers": 4, "q_lora_rank": 20, "first_k_dense_replace": 1},
        n_shared_experts=2,
        num_experts_per_tok=2,
    ),
    "deepseek_v3 without narrow queries": transformers.DeepseekV3Config(
        **DEEPSEEK | {"num_hidden_layers": 2, "q_lora_rank": None, "first_k_dense_replace": 0}
    ),
    "gpt_oss": transformers.GptOssConfig(
        **LLAMA | {"num_hidden_layers": 4, "intermediate_size": 40, "head_dim": 16},
        num_local_experts=6,
        num_experts_per_tok=2,
    ),
    "gemma3_text": transformers.Gemma3TextConfig(**LLAMA | {"num_hidden_layers": 7, "head_dim": 16}),
    "llama4_text": transformers.Llama4TextConfig(
        **LLAMA | {"num_hidden_layers": 4, "head_dim": 12, "intermediate_size_mlp": 96},
        num_local_experts=4,
        pad_token_id=0,
    ),
    "t5": transformers.T5Config(**T5, num_layers=3),
    "t5 gated": transformers.T5Config(
        **T5,
        num_layers=2,
        num_decoder_layers=3,
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
    "qwen3-235b-a22b": transformers.Qwen3MoeConfig(
        hidden_size=4096,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        moe_intermediate_size=1536,
    ),
    "deepseek-v3": transformers.DeepseekV3Config(),
    "gpt-oss-120b": transformers.GptOssConfig(),
    "gemma3-27b": transformers.Gemma3TextConfig(
        hidden_size=5376,
        num_hidden_layers=62,
        num_attention_heads=32,
        num_key_value_heads=16,
        head_dim=128,
        intermediate_size=21504,
    ),
    "llama4-scout": transformers.Llama4TextConfig(),
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
        ("qwen3-8b", 8.19),
        ("qwen3-32b", 32.8),
        ("gpt-oss-20b", 20.91),
        ("gemma3-4b", 0.675 + 3.209),
        ("gemma3-12b", 1.012 + 10.759),
    ],
)
def test_size_of_a_name(name, billions):
    assert find_architecture(name).num_parameters / 1e9 == pytest.approx(billions, rel=1e-2)


@pytest.mark.parametrize(
    ("name", "billions", "rounding"),
    [
        ("mixtral-8x7b", 12.9, 0.2),
        ("qwen3-235b-a22b", 22, 0.5),
        ("deepseek-v3", 37, 0.5),
        ("gpt-oss-20b", 3.61, 0.005),
        ("gpt-oss-120b", 5.13, 0.005),
    ],
)
def test_parameters_that_a_token_uses(name, billions, rounding):
    assert find_architecture(name).active_parameters / 1e9 == pytest.approx(billions, abs=rounding)


def test_a_name_that_nobody_knows():
    with pytest.raises(UsageError, match=r"there is no architecture 'lama 3 8b'; did you mean llama3-8b"):
        find_architecture("lama 3 8b")
    with pytest.raises(UsageError, match=r"known are gpt2-1\.5b"):
        find_architecture("qqqq")
    with pytest.raises(UsageError, match=r"no architecture 'resnet-50': .* Give the model itself, by a func"):
        find_architecture("resnet-50")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mamba"}, "model_type is 'mamba', but only bloom, deepseek_v3, gemma3"),
        ({"n_layer": None}, "n_layer is missing"),
        ({"n_layer": -1}, "n_layer is -1, but it must be a whole number from 1"),
        ({"n_embd": True}, "n_embd is True"),
    ],
)
def test_configurations_that_cannot_be_read(change, message):
    with pytest.raises(ConfigError, match=message):
        from_hugging_face(SMALL["gpt2"].to_dict() | change)


@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, but only 1 can be read"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], but only \[\] can be read"),
        ("llama4_text", {"interleave_moe_layer_step": 2}, "interleave_moe_layer_step is 2, but only 1"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias is True, but only False"),
        ("deepseek_v3", {"first_k_dense_replace": 9}, "first_k_dense_replace is 9, but there are 4 layers"),
        ("gemma3_text", {"layer_types": 3}, "layer_types is 3, but it must list the kinds of 7 layers"),
        ("gemma3_text", {"text_config": 3}, "text_config is 3, but it must be an object"),
    ],
)
def test_configurations_of_newer_models_that_cannot_be_read(kind, change, message):
    with pytest.raises(ConfigError, match=message):
        from_hugging_face(SMALL[kind].to_dict() | change)

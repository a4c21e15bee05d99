"""Reads architectures from Hugging Face configuration files."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from shardwright.catalogue.configuration_fields import Document, Fields
from shardwright.catalogue.transformer import LatentAttention, Transformer
from shardwright.errors import ConfigError
from shardwright.printable import shown

__all__ = ["from_hugging_face"]


def from_hugging_face(document: Document, *, name: str | None = None) -> Transformer:
    """The architecture that a ``config.json`` describes."""
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(
            f"model_type is {shown(kind)}, but only {', '.join(sorted(_READERS))} can be read. Pass the "
            "model itself (package.module:function) instead of its configuration."
        )
    return _READERS[kind](Fields(document), name or str(kind))


def _gpt2(fields: Fields, name: str) -> Transformer:
    hidden = fields.number("n_embd")
    return Transformer(
        name=name,
        layers=fields.layers("n_layer"),
        hidden=hidden,
        heads=fields.number("n_head"),
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("n_positions", "n_ctx"),
        ffn=fields.number("n_inner", default=4 * hidden),
    )


def _gptj(fields: Fields, name: str) -> Transformer:
    hidden = fields.number("n_embd")
    return Transformer(
        name=name,
        layers=fields.layers("n_layer"),
        hidden=hidden,
        heads=fields.number("n_head"),
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("n_positions"),
        ffn=fields.number("n_inner", default=4 * hidden),
        tied=fields.flag("tie_word_embeddings", False),
        positions="rotary",
        attention_biases=False,
        output_biases=False,
        head_biases=True,
        block_norms=1,
    )


def _gpt_neox(fields: Fields, name: str) -> Transformer:
    return Transformer(
        name=name,
        layers=fields.layers("num_hidden_layers"),
        hidden=fields.number("hidden_size"),
        heads=fields.number("num_attention_heads"),
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("max_position_embeddings"),
        ffn=fields.number("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", False),
        positions="rotary",
        attention_biases=fields.flag("attention_bias", True),
        output_biases=fields.flag("attention_bias", True),
    )


def _bloom(fields: Fields, name: str) -> Transformer:
    hidden = fields.number("hidden_size", "n_embed")
    return Transformer(
        name=name,
        layers=fields.layers("n_layer"),
        hidden=hidden,
        heads=fields.number("n_head"),
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("seq_length", default=2048),
        ffn=4 * hidden,
        positions="alibi",
        embedding_norm=True,
    )


def _opt(fields: Fields, name: str) -> Transformer:
    return Transformer(
        name=name,
        layers=fields.layers("num_hidden_layers"),
        hidden=fields.number("hidden_size"),
        heads=fields.number("num_attention_heads"),
        vocabulary=fields.number("vocab_size"),
        # The table has two entries for padding.
        sequence=fields.number("max_position_embeddings") + 2,
        ffn=fields.number("ffn_dim"),
    )


def _llama(fields: Fields, name: str) -> Transformer:
    heads = fields.number("num_attention_heads")
    biases = fields.flag("attention_bias", False)
    return Transformer(
        name=name,
        layers=fields.layers("num_hidden_layers"),
        hidden=fields.number("hidden_size"),
        heads=heads,
        kv_heads=fields.number("num_key_value_heads", default=heads),
        head_size=fields.number("head_dim", default=fields.number("hidden_size") // heads),
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("max_position_embeddings"),
        ffn=fields.number("intermediate_size"),
        gated=True,
        tied=fields.flag("tie_word_embeddings", False),
        positions="rotary",
        attention_biases=biases or fields.kind == "qwen2",
        output_biases=biases,
        mlp_biases=fields.flag("mlp_bias", False),
        norm_biases=False,
        experts=fields.number("num_local_experts", default=1),
        experts_per_token=fields.number("num_experts_per_tok", default=1),
    )


def _qwen3(fields: Fields, name: str) -> Transformer:
    return replace(_llama(fields, name), head_norms=True)


def _qwen3_moe(fields: Fields, name: str) -> Transformer:
    fields.refuse_other("decoder_sparse_step", 1)
    fields.refuse_other("mlp_only_layers", [])
    return replace(
        _qwen3(fields, name),
        ffn=fields.number("moe_intermediate_size"),
        experts=fields.number("num_experts", "num_local_experts"),
        experts_per_token=fields.number("num_experts_per_tok"),
    )


def _deepseek_v3(fields: Fields, name: str) -> Transformer:
    """Without the modules that predict further tokens, which Hugging Face's class does not have either."""
    hidden, expert = fields.number("hidden_size"), fields.number("moe_intermediate_size")
    rotary = fields.number("qk_rope_head_dim")
    layers = fields.layers("num_hidden_layers")
    dense = fields.number("first_k_dense_replace", default=0, least=0)
    if dense > layers:
        raise ConfigError(f"first_k_dense_replace is {dense}, but there are {layers} layers.")
    fields.refuse_other("attention_bias", False)
    fields.refuse_other("moe_layer_freq", 1)
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=fields.number("num_attention_heads"),
        head_size=fields.number("qk_nope_head_dim") + rotary,
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("max_position_embeddings"),
        ffn=expert,
        experts=fields.number("n_routed_experts", "num_local_experts"),
        experts_per_token=fields.number("num_experts_per_tok"),
        shared_ffn=expert * fields.number("n_shared_experts"),
        dense_layers=dense,
        dense_ffn=fields.number("intermediate_size"),
        latent=LatentAttention(
            query_rank=fields.number("q_lora_rank", default=0, least=0),
            key_rank=fields.number("kv_lora_rank"),
            rotary_width=rotary,
            value_width=fields.number("v_head_dim"),
        ),
        gated=True,
        tied=fields.flag("tie_word_embeddings", False),
        positions="rotary",
        **_NO_BIASES,
    )


def _gpt_oss(fields: Fields, name: str) -> Transformer:
    layers = fields.layers("num_hidden_layers")
    biases = fields.flag("attention_bias", True)
    return Transformer(
        name=name,
        layers=layers,
        hidden=fields.number("hidden_size"),
        heads=fields.number("num_attention_heads"),
        kv_heads=fields.number("num_key_value_heads"),
        head_size=fields.number("head_dim"),
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("max_position_embeddings"),
        ffn=fields.number("intermediate_size"),
        experts=fields.number("num_local_experts"),
        experts_per_token=fields.number("num_experts_per_tok", "experts_per_token"),
        router_biases=True,
        sinks=True,
        window=fields.number("sliding_window"),
        windowed_layers=fields.windowed(layers, every=2),
        gated=True,
        tied=fields.flag("tie_word_embeddings", False),
        positions="rotary",
        attention_biases=biases,
        output_biases=biases,
        norm_biases=False,
    )


def _gemma3(fields: Fields, name: str) -> Transformer:
    """The language model, without the encoder of images; absent fields are those of the class."""
    text = fields.inner("text_config")
    layers = text.layers("num_hidden_layers", default=26)
    return Transformer(
        name=name,
        layers=layers,
        hidden=text.number("hidden_size", default=2304),
        heads=text.number("num_attention_heads", default=8),
        kv_heads=text.number("num_key_value_heads", default=4),
        head_size=text.number("head_dim", default=256),
        vocabulary=text.number("vocab_size", default=262208),
        sequence=text.number("max_position_embeddings", default=131072),
        ffn=text.number("intermediate_size", default=9216),
        window=text.number("sliding_window", default=4096),
        windowed_layers=text.windowed(layers, every=text.number("sliding_window_pattern", default=6)),
        head_norms=True,
        block_norms=4,
        gated=True,
        tied=fields.flag("tie_word_embeddings", True),
        positions="rotary",
        **_NO_BIASES,
    )


def _llama4(fields: Fields, name: str) -> Transformer:
    """The language model, without the encoder of images, where each block has experts (Scout)."""
    text = fields.inner("text_config")
    layers, ffn = text.layers("num_hidden_layers"), text.number("intermediate_size")
    text.refuse_other("interleave_moe_layer_step", 1)
    return replace(
        _llama(text, name),
        ffn=ffn,
        shared_ffn=ffn,
        # Chunks: a token attends to half of one, as a mean.
        window=max(1, text.number("attention_chunk_size", default=8192) // 2),
        windowed_layers=text.windowed(layers, every=4),
    )


def _t5(fields: Fields, name: str) -> Transformer:
    layers = fields.layers("num_layers")
    return Transformer(
        name=name,
        layers=fields.layers("num_decoder_layers", default=layers),
        encoder_layers=layers,
        hidden=fields.number("d_model"),
        heads=fields.number("num_heads"),
        head_size=fields.number("d_kv"),
        vocabulary=fields.number("vocab_size"),
        sequence=fields.number("n_positions", default=512),
        ffn=fields.number("d_ff"),
        gated=fields.text("feed_forward_proj", "relu").startswith("gated"),
        tied=fields.flag("tie_word_embeddings", True),
        positions="relative",
        attention_biases=False,
        output_biases=False,
        mlp_biases=False,
        norm_biases=False,
    )


_NO_BIASES: dict[str, Any] = {
    "attention_biases": False,
    "output_biases": False,
    "mlp_biases": False,
    "norm_biases": False,
}

_READERS: dict[str, Callable[[Fields, str], Transformer]] = {
    "bloom": _bloom,
    "deepseek_v3": _deepseek_v3,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gpt_oss": _gpt_oss,
    "gptj": _gptj,
    "llama": _llama,
    "llama4": _llama4,
    "llama4_text": _llama4,
    "mistral": _llama,
    "mixtral": _llama,
    "opt": _opt,
    "qwen2": _llama,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "t5": _t5,
}

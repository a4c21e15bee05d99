"""Small models of the six architectures whose attention the switch routes, without downloads."""

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["SIX", "build"]

_TOKENS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
HEADS, HIDDEN, LAYERS, WINDOW = 4, 32, 4, 5


def _bert(positions: int, dropout: float) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    drops = {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    return sizes | drops | {"intermediate_size": 64, "max_position_embeddings": positions + 2}


def _gpt(positions: int, dropout: float) -> dict[str, Any]:
    sizes = {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "n_positions": positions}
    return sizes | dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), dropout)


def _gpt_neo(positions: int, dropout: float) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "num_layers": LAYERS, "num_heads": HEADS, "window_size": WINDOW}
    kinds = {"attention_types": [[["global", "local"], LAYERS // 2]], "max_position_embeddings": positions}
    return sizes | kinds | dict.fromkeys(("attention_dropout", "resid_dropout", "embed_dropout"), dropout)


def _gpt_neox(positions: int, dropout: float) -> dict[str, Any]:
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
    more = {"intermediate_size": 64, "max_position_embeddings": positions}
    return sizes | more | dict.fromkeys(("attention_dropout", "hidden_dropout"), dropout)


SIX: dict[str, tuple[str, Callable[[int, float], dict[str, Any]]]] = {
    "BERT": ("BertForMaskedLM", _bert),
    "RoBERTa": ("RobertaForMaskedLM", _bert),
    "GPT-2": ("GPT2LMHeadModel", _gpt),
    "GPT-J": ("GPTJForCausalLM", lambda positions, dropout: _gpt(positions, dropout) | {"rotary_dim": 4}),
    "GPT-Neo": ("GPTNeoForCausalLM", _gpt_neo),
    "GPT-NeoX": ("GPTNeoXForCausalLM", _gpt_neox),
}


def build(name: str, *, positions: int = 64, dropout: float = 0.0, **more: Any) -> nn.Module:
    """A model with random weights."""
    import transformers

    kind, settings = SIX[name]
    model_class = getattr(transformers, kind)
    config = model_class.config_class(**_TOKENS, **settings(positions, dropout), **more)
    model: nn.Module = model_class(config)
    return model

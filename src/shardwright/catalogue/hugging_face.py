"""Reads architectures from Hugging Face configuration files."""

from collections.abc import Callable, Mapping
from typing import Any

from shardwright.catalogue.transformer import Transformer
from shardwright.errors import ConfigError
from shardwright.printable import shown

__all__ = ["from_hugging_face"]

Document = Mapping[str, Any]

_MOST = 10**9
_MOST_LAYERS = 100_000


def from_hugging_face(document: Document, *, name: str | None = None) -> Transformer:
    """The architecture that a ``config.json`` describes.

    Args:
        document: the file's content.
        name: for display; by default the model type.

    Raises:
        ConfigError: the type of model is not known, or an entry is missing or no positive number.
    """
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(
            f"model_type is {shown(kind)}, but only {', '.join(sorted(_READERS))} can be read. Pass the "
            "model itself (package.module:function) instead of its configuration."
        )
    return _READERS[kind](_Fields(document), name or str(kind))


class _Fields:
    """Entries of a file; the first name that it has counts."""

    def __init__(self, document: Document):
        self._document = document

    def number(self, *names: str, default: int | None = None) -> int:
        given = (self._document.get(name) for name in names)
        found = next((value for value in given if value is not None), default)
        if found is None:
            raise ConfigError(f"{names[0]} is missing in the configuration of the model.")
        if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found <= _MOST:
            raise ConfigError(
                f"{names[0]} is {shown(found)}, but it must be a whole number from 1 to {_MOST}."
            )
        return found

    def layers(self, *names: str, default: int | None = None) -> int:
        """A checked number of layers, since code walks through each of them."""
        found = self.number(*names, default=default)
        if found > _MOST_LAYERS:
            raise ConfigError(f"{names[0]} is {found}, but it must be at most {_MOST_LAYERS}.")
        return found

    @property
    def kind(self) -> str:
        return str(self._document["model_type"])

    def text(self, name: str, default: str) -> str:
        found = self._document.get(name, default)
        if not isinstance(found, str):
            raise ConfigError(f"{name} is {shown(found)}, but it must be text.")
        return found

    def flag(self, name: str, default: bool) -> bool:
        found = self._document.get(name)
        if found is not None and not isinstance(found, bool):
            raise ConfigError(f"{name} is {shown(found)}, but it must be true or false.")
        return default if found is None else found


def _gpt2(fields: _Fields, name: str) -> Transformer:
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


def _gptj(fields: _Fields, name: str) -> Transformer:
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


def _gpt_neox(fields: _Fields, name: str) -> Transformer:
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


def _bloom(fields: _Fields, name: str) -> Transformer:
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


def _opt(fields: _Fields, name: str) -> Transformer:
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


def _llama(fields: _Fields, name: str) -> Transformer:
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


def _t5(fields: _Fields, name: str) -> Transformer:
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


_READERS: dict[str, Callable[[_Fields, str], Transformer]] = {
    "bloom": _bloom,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "gptj": _gptj,
    "llama": _llama,
    "mistral": _llama,
    "mixtral": _llama,
    "opt": _opt,
    "qwen2": _llama,
    "t5": _t5,
}

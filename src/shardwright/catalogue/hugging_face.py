"""Architectures by name, and of Hugging Face's ``config.json``."""

import difflib
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from shardwright.catalogue.transformer import LatentAttention, Transformer
from shardwright.errors import ConfigError, UsageError
from shardwright.files.documents import parse_yaml
from shardwright.text import shown

_Document = Mapping[str, Any]

_MOST = 10**9
_MOST_LAYERS = 100_000


class _Fields:
    """Entries of a configuration, checked; of several names, the first that it has counts."""

    def __init__(self, document: _Document):
        self._document = document

    def inner(self, name: str) -> "_Fields":
        """The fields of a part of the model; of a file that has no such part, its own."""
        found = self._document.get(name)
        if found is None:
            return self
        if not isinstance(found, Mapping):
            raise ConfigError(f"{name} is {shown(found)}, but it must be an object.")
        return _Fields({"model_type": self.kind, **found})

    def windowed(self, layers: int, *, every: int) -> int:
        """How many layers attend to a window; where no list says it, all but one in `every`."""
        kinds = self._document.get("layer_types")
        if kinds is None:
            return layers - layers // every
        if not isinstance(kinds, list) or len(kinds) != layers:
            raise ConfigError(
                f"layer_types is {shown(kinds)}, but it must list the kinds of {layers} layers."
            )
        return sum(kind != "full_attention" for kind in kinds)

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        given = (self._document.get(name) for name in names)
        found = next((value for value in given if value is not None), default)
        if found is None:
            raise ConfigError(f"{names[0]} is missing in the configuration of the model.")
        if isinstance(found, bool) or not isinstance(found, int) or not least <= found <= _MOST:
            raise ConfigError(
                f"{names[0]} is {shown(found)}, but it must be a whole number from {least} to {_MOST}."
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

    def refuse_other(self, name: str, only: object) -> None:
        """Refuses a field that is there with another value than the only one that is read."""
        found = self._document.get(name)
        if found not in (None, only):
            raise ConfigError(
                f"{name} is {shown(found)}, but only {only!r} can be read. Pass the model itself "
                "(package.module:function) instead of its configuration."
            )

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


def from_hugging_face(document: _Document, *, name: str | None = None) -> Transformer:
    """The architecture that a ``config.json`` describes."""
    kind = document.get("model_type")
    if not isinstance(kind, str) or kind not in _READERS:
        raise ConfigError(
            f"model_type is {shown(kind)}, but only {', '.join(sorted(_READERS))} can be read. Pass the "
            "model itself (package.module:function) instead of its configuration."
        )
    return _READERS[kind](_Fields(document), name or str(kind))


def _usual(fields: _Fields, **more: Any) -> dict[str, Any]:
    """What most configurations call alike."""
    found = {
        "layers": fields.layers("num_hidden_layers"),
        "hidden": fields.number("hidden_size"),
        "heads": fields.number("num_attention_heads"),
        "vocabulary": fields.number("vocab_size"),
    }
    if "sequence" not in more:
        found["sequence"] = fields.number("max_position_embeddings")
    return found | more


_ROTARY: dict[str, Any] = {"positions": "rotary", "norm_biases": False, "gated": True}
_NO_BIASES: dict[str, Any] = dict.fromkeys(
    ("attention_biases", "output_biases", "mlp_biases", "norm_biases"), False
)


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
    return replace(
        _gpt2(fields, name),
        tied=fields.flag("tie_word_embeddings", False),
        positions="rotary",
        attention_biases=False,
        output_biases=False,
        head_biases=True,
        block_norms=1,
    )


def _gpt_neox(fields: _Fields, name: str) -> Transformer:
    biases = fields.flag("attention_bias", True)
    return Transformer(
        name=name,
        **_usual(fields),
        ffn=fields.number("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", False),
        positions="rotary",
        attention_biases=biases,
        output_biases=biases,
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
    # The table has two entries for padding.
    sequence = fields.number("max_position_embeddings") + 2
    return Transformer(name=name, **_usual(fields, sequence=sequence), ffn=fields.number("ffn_dim"))


def _llama(fields: _Fields, name: str) -> Transformer:
    usual = _usual(fields)
    biases = fields.flag("attention_bias", False)
    return Transformer(
        name=name,
        **usual,
        **_ROTARY,
        kv_heads=fields.number("num_key_value_heads", default=usual["heads"]),
        head_size=fields.number("head_dim", default=usual["hidden"] // usual["heads"]),
        ffn=fields.number("intermediate_size"),
        tied=fields.flag("tie_word_embeddings", False),
        attention_biases=biases or fields.kind == "qwen2",
        output_biases=biases,
        mlp_biases=fields.flag("mlp_bias", False),
        experts=fields.number("num_local_experts", default=1),
        experts_per_token=fields.number("num_experts_per_tok", default=1),
    )


def _qwen3(fields: _Fields, name: str) -> Transformer:
    return replace(_llama(fields, name), head_norms=True)


def _qwen3_moe(fields: _Fields, name: str) -> Transformer:
    fields.refuse_other("decoder_sparse_step", 1)
    fields.refuse_other("mlp_only_layers", [])
    return replace(
        _qwen3(fields, name),
        ffn=fields.number("moe_intermediate_size"),
        experts=fields.number("num_experts", "num_local_experts"),
        experts_per_token=fields.number("num_experts_per_tok"),
    )


def _deepseek_v3(fields: _Fields, name: str) -> Transformer:
    """Without the modules that predict further tokens, which Hugging Face's class does not have either."""
    usual, expert = _usual(fields), fields.number("moe_intermediate_size")
    rotary = fields.number("qk_rope_head_dim")
    dense = fields.number("first_k_dense_replace", default=0, least=0)
    if dense > usual["layers"]:
        raise ConfigError(f"first_k_dense_replace is {dense}, but there are {usual['layers']} layers.")
    fields.refuse_other("attention_bias", False)
    fields.refuse_other("moe_layer_freq", 1)
    return Transformer(
        name=name,
        **usual,
        **_ROTARY | _NO_BIASES,
        head_size=fields.number("qk_nope_head_dim") + rotary,
        ffn=expert,
        experts=fields.number("n_routed_experts", "num_local_experts"),
        experts_per_token=fields.number("num_experts_per_tok"),
        expert_groups=fields.number("n_group", default=1),
        groups_per_token=fields.number("topk_group", default=1),
        shared_ffn=expert * fields.number("n_shared_experts"),
        dense_layers=dense,
        dense_ffn=fields.number("intermediate_size"),
        latent=LatentAttention(
            query_rank=fields.number("q_lora_rank", default=0, least=0),
            key_rank=fields.number("kv_lora_rank"),
            rotary_width=rotary,
            value_width=fields.number("v_head_dim"),
        ),
        tied=fields.flag("tie_word_embeddings", False),
    )


def _gpt_oss(fields: _Fields, name: str) -> Transformer:
    usual, biases = _usual(fields), fields.flag("attention_bias", True)
    return Transformer(
        name=name,
        **usual,
        **_ROTARY,
        kv_heads=fields.number("num_key_value_heads"),
        head_size=fields.number("head_dim"),
        ffn=fields.number("intermediate_size"),
        experts=fields.number("num_local_experts"),
        experts_per_token=fields.number("num_experts_per_tok", "experts_per_token"),
        router_biases=True,
        sinks=True,
        window=fields.number("sliding_window"),
        windowed_layers=fields.windowed(usual["layers"], every=2),
        tied=fields.flag("tie_word_embeddings", False),
        attention_biases=biases,
        output_biases=biases,
    )


def _gemma3(fields: _Fields, name: str) -> Transformer:
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
        tied=fields.flag("tie_word_embeddings", True),
        **_ROTARY | _NO_BIASES,
    )


def _llama4(fields: _Fields, name: str) -> Transformer:
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
        **_NO_BIASES,
    )


_READERS: dict[str, Callable[[_Fields, str], Transformer]] = {
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


def _known() -> dict[str, Transformer]:
    text = files("shardwright.catalogue").joinpath("architectures.yaml").read_text(encoding="utf-8")
    return {
        name: replace(from_hugging_face(entry["config"], name=name), source=entry["source"])
        for name, entry in parse_yaml(text).items()
    }


ARCHITECTURES: Mapping[str, Transformer] = MappingProxyType(_known())
"""Language models that are known by name."""

_REMOVED = ("resnet", "unet", "vit", "whisper", "dit", "sd3")
"""What the names of models began with that were known here, layer by layer."""


def find_architecture(name: str) -> Transformer:
    """The architecture of a name; case, ``_`` and blanks do not matter.

    >>> find_architecture("GPT-NeoX 20B").name
    'gpt-neox-20b'
    """
    wanted = _plain(name)
    for known, architecture in ARCHITECTURES.items():
        if _plain(known) == wanted:
            return architecture
    if wanted.startswith(_REMOVED):
        raise UsageError(
            f"there is no architecture {name!r}: the names are of language models. Give the model itself, by "
            "a function that builds it with a batch: package.module:build"
        )
    plain = {_plain(known): known for known in ARCHITECTURES}
    near = [plain[text] for text in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(ARCHITECTURES)}."
    raise UsageError(f"there is no architecture {name!r}; {hint}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")

"""The known architectures, by name."""

import difflib
from dataclasses import replace

from shardwright.catalogue.convolutional import CONVOLUTIONAL
from shardwright.catalogue.layer_chain import LayerChain
from shardwright.catalogue.transformer import Transformer
from shardwright.errors import UsageError

__all__ = ["ARCHITECTURES", "find_architecture"]


def _neox(name: str, *, layers: int, hidden: int, heads: int, source: str) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=50432,
        sequence=2048,
        ffn=4 * hidden,
        tied=False,
        positions="rotary",
        source=source,
    )


def _bloom(name: str, *, layers: int, hidden: int, heads: int, source: str) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        vocabulary=250880,
        sequence=2048,
        ffn=4 * hidden,
        positions="alibi",
        embedding_norm=True,
        source=source,
    )


def _t5(name: str, *, heads: int, ffn: int) -> Transformer:
    return Transformer(
        name=name,
        layers=24,
        encoder_layers=24,
        hidden=1024,
        heads=heads,
        head_size=128,
        vocabulary=32128,
        sequence=512,
        ffn=ffn,
        positions="relative",
        attention_biases=False,
        output_biases=False,
        mlp_biases=False,
        norm_biases=False,
        source="Raffel et al. 2020, arXiv:1910.10683",
    )


def _llama(
    name: str, *, layers: int, hidden: int, heads: int, ffn: int, vocabulary: int, sequence: int, source: str
) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=8,
        vocabulary=vocabulary,
        sequence=sequence,
        ffn=ffn,
        gated=True,
        tied=False,
        positions="rotary",
        attention_biases=False,
        output_biases=False,
        mlp_biases=False,
        norm_biases=False,
        source=source,
    )


_LLAMA_3 = {"vocabulary": 128256, "sequence": 8192, "source": "Llama team 2024, arXiv:2407.21783"}

_ALL = (
    Transformer(
        name="gpt2-1.5b",
        layers=48,
        hidden=1600,
        heads=25,
        vocabulary=50257,
        sequence=1024,
        ffn=6400,
        source="Radford et al. 2019, GPT-2 XL",
    ),
    _t5("t5-3b", heads=32, ffn=16384),
    _t5("t5-11b", heads=128, ffn=65536),
    Transformer(
        name="gpt-j-6b",
        layers=28,
        hidden=4096,
        heads=16,
        vocabulary=50400,
        sequence=2048,
        ffn=16384,
        tied=False,
        positions="rotary",
        attention_biases=False,
        output_biases=False,
        head_biases=True,
        block_norms=1,
        source="Wang and Komatsuzaki 2021, mesh-transformer-jax",
    ),
    _neox("gpt-neox-13b", layers=40, hidden=5120, heads=40, source="the 13B shape of Brown et al. 2020"),
    _neox("gpt-neox-20b", layers=44, hidden=6144, heads=64, source="Black et al. 2022, arXiv:2204.06745"),
    _neox("gpt-neox-100b", layers=56, hidden=12288, heads=96, source="102.7 billion in the shape of GPT-3"),
    _bloom("bloom-50b", layers=62, hidden=8192, heads=64, source="50 billion in the shape of Bloom"),
    _bloom("bloom-176b", layers=70, hidden=14336, heads=112, source="BigScience 2022, arXiv:2211.05100"),
    Transformer(
        name="gpt3-175b",
        layers=96,
        hidden=12288,
        heads=96,
        vocabulary=50257,
        sequence=2048,
        ffn=49152,
        source="Brown et al. 2020, arXiv:2005.14165",
    ),
    _llama("llama3-8b", layers=32, hidden=4096, heads=32, ffn=14336, **_LLAMA_3),  # type: ignore[arg-type]
    _llama("llama3-70b", layers=80, hidden=8192, heads=64, ffn=28672, **_LLAMA_3),  # type: ignore[arg-type]
    _llama("llama3-405b", layers=126, hidden=16384, heads=128, ffn=53248, **_LLAMA_3),  # type: ignore[arg-type]
    replace(
        _llama(
            "mixtral-8x7b",
            layers=32,
            hidden=4096,
            heads=32,
            ffn=14336,
            vocabulary=32000,
            sequence=32768,
            source="Jiang et al. 2024, arXiv:2401.04088",
        ),
        experts=8,
        experts_per_token=2,
    ),
)

ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}
"""Those that are known by name."""


def find_architecture(name: str) -> Transformer | LayerChain:
    """The architecture of a name; case, ``_`` and blanks do not matter.

    Raises:
        UsageError: there is none; the nearest names are given.

    >>> find_architecture("GPT-NeoX 20B").name
    'gpt-neox-20b'
    """
    wanted = _plain(name)
    everything: dict[str, Transformer | LayerChain] = {**ARCHITECTURES, **CONVOLUTIONAL}
    for known, architecture in everything.items():
        if _plain(known) == wanted:
            return architecture
    plain = {_plain(known): known for known in everything}
    near = [plain[text] for text in difflib.get_close_matches(wanted, plain, n=3, cutoff=0.5)]
    hint = f"did you mean {' or '.join(near)}?" if near else f"known are {', '.join(everything)}."
    raise UsageError(f"there is no architecture {name!r}; {hint}")


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum() or letter == ".")

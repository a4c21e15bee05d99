"""The known architectures, by name."""

import difflib
from dataclasses import replace

from shardwright.catalogue.transformer import LatentAttention, Transformer
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


def _qwen3(name: str, *, layers: int, hidden: int, heads: int, ffn: int) -> Transformer:
    return replace(
        _llama(
            name,
            layers=layers,
            hidden=hidden,
            heads=heads,
            ffn=ffn,
            vocabulary=151936,
            sequence=4096,
            source="Qwen team 2025, arXiv:2505.09388",
        ),
        head_size=128,
        head_norms=True,
    )


def _gpt_oss(name: str, *, layers: int, experts: int) -> Transformer:
    return Transformer(
        name=name,
        layers=layers,
        hidden=2880,
        heads=64,
        kv_heads=8,
        head_size=64,
        vocabulary=201088,
        sequence=4096,
        ffn=2880,
        experts=experts,
        experts_per_token=4,
        router_biases=True,
        sinks=True,
        window=128,
        windowed_layers=layers // 2,
        gated=True,
        tied=False,
        positions="rotary",
        norm_biases=False,
        source="OpenAI 2025, arXiv:2508.10925",
    )


def _gemma3(
    name: str, *, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, head_size: int = 256
) -> Transformer:
    """Without the encoder of images, which is frozen and the same for all."""
    return Transformer(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        vocabulary=262208,
        sequence=32768,
        ffn=ffn,
        window=1024,
        windowed_layers=layers - layers // 6,
        head_norms=True,
        block_norms=4,
        gated=True,
        positions="rotary",
        attention_biases=False,
        output_biases=False,
        mlp_biases=False,
        norm_biases=False,
        source="Gemma team 2025, arXiv:2503.19786, the language model",
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
    replace(
        _llama(
            "llama4-scout",
            layers=48,
            hidden=5120,
            heads=40,
            ffn=8192,
            vocabulary=202048,
            sequence=8192,
            source="Meta 2025, Llama 4 model card, the language model",
        ),
        experts=16,
        experts_per_token=1,
        shared_ffn=8192,
        window=4096,  # attention in chunks of 8192, of which a token attends to half, as a mean
        windowed_layers=36,
    ),
    _qwen3("qwen3-8b", layers=36, hidden=4096, heads=32, ffn=12288),
    _qwen3("qwen3-32b", layers=64, hidden=5120, heads=64, ffn=25600),
    replace(
        _qwen3("qwen3-235b-a22b", layers=94, hidden=4096, heads=64, ffn=1536),
        kv_heads=4,
        experts=128,
        experts_per_token=8,
    ),
    Transformer(
        name="deepseek-v3",
        layers=61,
        hidden=7168,
        heads=128,
        head_size=192,
        vocabulary=129280,
        sequence=4096,
        ffn=2048,
        experts=256,
        experts_per_token=8,
        shared_ffn=2048,
        dense_layers=3,
        dense_ffn=18432,
        latent=LatentAttention(query_rank=1536, key_rank=512, rotary_width=64, value_width=128),
        gated=True,
        tied=False,
        positions="rotary",
        attention_biases=False,
        output_biases=False,
        mlp_biases=False,
        norm_biases=False,
        source="DeepSeek-AI 2024, arXiv:2412.19437, without multi-token prediction",
    ),
    _gpt_oss("gpt-oss-20b", layers=24, experts=32),
    _gpt_oss("gpt-oss-120b", layers=36, experts=128),
    _gemma3("gemma3-4b", layers=34, hidden=2560, heads=8, kv_heads=4, ffn=10240),
    _gemma3("gemma3-12b", layers=48, hidden=3840, heads=16, kv_heads=8, ffn=15360),
    _gemma3("gemma3-27b", layers=62, hidden=5376, heads=32, kv_heads=16, ffn=21504, head_size=128),
)

ARCHITECTURES = {architecture.name: architecture for architecture in _ALL}
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

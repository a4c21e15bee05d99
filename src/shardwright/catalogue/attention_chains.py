"""Networks of attention blocks that are no language models, block by block: of images, speech and diffusion.

A `Transformer` has one length of sequence, so what has several (speech beside text, an image beside its
caption), or a head that is no vocabulary, is a chain. With T tokens of width h, an MLP of width f, and K keys
that a query attends to, a block computes and keeps, in numbers a sample::

    products    T (4 h^2 + 2 h f)        attention   4 T K h FLOPs, half of them where it is causal
    moved       16 T h for attention, and as many for the MLP: norms, activations, additions
    kept        T (9 h + 2 f)            as `shardwright.costs.kept` has it for a transformer's block
"""

from dataclasses import replace

from shardwright.catalogue.layer_chain import Layer, LayerChain
from shardwright.errors import ConfigError

__all__ = ["ATTENTION_CHAINS", "diffusion_transformer", "speech_to_text", "vision_transformer"]

_MOVED_OF_PART = 16  # numbers of a token and hidden element around attention, or around the MLP
_KERNELS_OF_PART = 6
_MOVED_OF_LOSS, _KEPT_OF_LOSS = 8, 3  # numbers of each logit


def _block(
    name: str, tokens: int, hidden: int, ffn: int, *, keys: int, causal: bool = False, key_biases: bool = True
) -> Layer:
    """A block whose tokens attend to `keys` others: two norms, attention, an MLP; all with biases."""
    attention = 4 * hidden * hidden + (3 + key_biases) * hidden
    mlp = 2 * hidden * ffn + ffn + hidden
    return Layer(
        name=name,
        parameters=attention + mlp + 4 * hidden,
        flops=2.0 * tokens * (4 * hidden * hidden + 2 * hidden * ffn),
        attention=4.0 * tokens * keys * hidden * (0.5 if causal else 1.0),
        moved=2.0 * _MOVED_OF_PART * tokens * hidden,
        product_moved=tokens * (4.0 * hidden + ffn),
        kept=tokens * (9.0 * hidden + 2 * ffn),
        inputs=float(tokens * hidden),
        crossing=float(tokens * hidden),
        products=4.0,
        kernels=2.0 * _KERNELS_OF_PART,
    )


def _with_cross_attention(block: Layer, tokens: int, source: int, hidden: int) -> Layer:
    """The block of a decoder, which attends to `source` tokens of an encoder too; they pass it by."""
    products = 2.0 * hidden * hidden * (tokens + source)
    return replace(
        block,
        parameters=block.parameters + 4 * hidden * hidden + 3 * hidden + 2 * hidden,
        flops=block.flops + 2 * products,
        attention=block.attention + 4.0 * tokens * source * hidden,
        moved=block.moved + _MOVED_OF_PART * tokens * hidden,
        product_moved=block.product_moved + hidden * (2.0 * tokens + 1.5 * source),
        kept=block.kept + 2.0 * hidden * (tokens + source),
        inputs=block.inputs + source * hidden,
        crossing=block.crossing + source * hidden,
        products=block.products + 3,
        kernels=block.kernels + _KERNELS_OF_PART,
    )


def _product(name: str, tokens: int, inner: int, columns: int, *, parameters: int) -> Layer:
    """A product with an activation or an addition: the embedding of patches, a convolution, a small head."""
    return Layer(
        name=name,
        parameters=parameters,
        flops=2.0 * tokens * inner * columns,
        moved=2.0 * tokens * columns,
        product_moved=tokens * (inner + columns) / 2,
        kept=float(tokens * (inner + columns)),
        inputs=float(tokens * inner),
        crossing=float(tokens * columns),
    )


def vision_transformer(
    name: str,
    *,
    layers: int,
    hidden: int,
    heads: int,
    ffn: int,
    image: int,
    patch: int,
    channels: int = 3,
    classes: int = 1000,
    source: str = "",
) -> LayerChain:
    """A classifier of images by Dosovitskiy et al. 2020, arXiv:2010.11929.

    Args:
        name: for display.
        layers: blocks.
        hidden: width of the residual stream.
        heads: attention heads, into which it is divided.
        ffn: width inside of the MLP.
        image: side of an image, in pixels.
        patch: side of a patch.
        channels: of a pixel.
        classes: of the head.
        source: where the numbers are from.

    Raises:
        ConfigError: heads do not divide the width, or an image is smaller than a patch.
    """
    _check_heads(hidden, heads)
    if image < patch:
        raise ConfigError(f"image_size is {image}, but a patch has {patch} pixels a side. Take a larger one.")
    tokens = (image // patch) ** 2 + 1
    inner = channels * patch * patch
    embedding = _product(
        "patches", tokens, inner, hidden, parameters=(inner + 1) * hidden + hidden + tokens * hidden
    )
    head = _product("norm and head", 1, hidden, classes, parameters=(hidden + 1) * classes + 2 * hidden)
    blocks = (_block(f"block {n}", tokens, hidden, ffn, keys=tokens) for n in range(layers))
    return LayerChain(
        name=name,
        layers=(embedding, *blocks, replace(head, inputs=float(tokens * hidden))),
        sample=f"image of {image} x {image}",
        source=source,
    )


def speech_to_text(
    name: str,
    *,
    encoder_layers: int,
    layers: int,
    hidden: int,
    encoder_heads: int,
    heads: int,
    encoder_ffn: int,
    ffn: int,
    vocabulary: int,
    frames: int,
    tokens: int,
    mel_bins: int,
    source: str = "",
) -> LayerChain:
    """An encoder of speech with a decoder of text by Radford et al. 2022, arXiv:2212.04356.

    Args:
        name: for display.
        encoder_layers, layers: blocks of the encoder, and of the decoder.
        hidden: width of both residual streams.
        encoder_heads, heads: attention heads of both, into which it is divided.
        encoder_ffn, ffn: widths inside of their MLPs.
        vocabulary: entries of the embedding, which is the head, too.
        frames: positions of the encoder, each of two columns of the spectrogram.
        tokens: positions of the decoder.
        mel_bins: rows of the spectrogram.
        source: where the numbers are from.

    Raises:
        ConfigError: heads do not divide the width.
    """
    _check_heads(hidden, encoder_heads)
    _check_heads(hidden, heads)
    passed = frames * hidden
    first = _product(
        "convolution 0", 2 * frames, 3 * mel_bins, hidden, parameters=(3 * mel_bins + 1) * hidden
    )
    second = _product(
        "convolution 1", frames, 3 * hidden, hidden, parameters=(3 * hidden + 1) * hidden + frames * hidden
    )
    encoder = [
        _block(f"encoder {n}", frames, hidden, encoder_ffn, keys=frames, key_biases=False)
        for n in range(encoder_layers)
    ]
    # The norm behind the last block.
    encoder[-1] = replace(encoder[-1], parameters=encoder[-1].parameters + 2 * hidden)
    embedding = Layer(
        name="embedding",
        parameters=(vocabulary + tokens) * hidden,
        flops=0.0,
        moved=3.0 * tokens * hidden,
        kept=float(tokens),
        inputs=float(tokens),
        crossing=float(tokens * hidden + passed),
        products=0.0,
    )
    own = (
        _block(f"decoder {n}", tokens, hidden, ffn, keys=tokens, causal=True, key_biases=False)
        for n in range(layers)
    )
    decoder = (_with_cross_attention(block, tokens, frames, hidden) for block in own)
    head = _product("norm and head", tokens, hidden, vocabulary, parameters=2 * hidden)
    head = replace(
        head,
        moved=_MOVED_OF_LOSS * float(tokens * vocabulary),
        kept=float(tokens * hidden) + _KEPT_OF_LOSS * float(tokens * vocabulary),
        crossing=float(tokens * vocabulary),
    )
    return LayerChain(
        name=name,
        layers=(first, second, *encoder, embedding, *decoder, head),
        sample=f"{frames} frames and {tokens} tokens",
        source=source,
    )


def diffusion_transformer(
    name: str,
    *,
    layers: int,
    hidden: int,
    ffn: int,
    side: int,
    patch: int,
    channels: int,
    caption: int,
    caption_width: int,
    pooled_width: int,
    source: str = "",
) -> LayerChain:
    """A multimodal diffusion transformer by Esser et al. 2024, arXiv:2403.03206.

    Tokens of the image and of its caption have weights of their own, and attend to both. The time and the
    pooled caption scale and shift what norms make (products of one row a sample).

    Args:
        name: for display.
        layers: joint blocks; of the last, the caption has keys and values alone.
        hidden: width of both residual streams.
        ffn: width inside of the MLPs.
        side: of the image as the autoencoder has it, in its pixels.
        patch: side of a patch of these.
        channels: of these pixels.
        caption: tokens of the caption.
        caption_width: width in which text encoders give them.
        pooled_width: width of the pooled caption.
        source: where the numbers are from.
    """
    tokens, inner, wave = (side // patch) ** 2, channels * patch * patch, 256
    square = hidden * hidden + hidden
    given = caption_width * hidden + hidden  # of the caption's tokens
    conditions = wave * hidden + hidden + square + pooled_width * hidden + hidden + square
    embedding = _product(
        "patches, caption, time", tokens, inner, hidden, parameters=(inner + 1) * hidden + given + conditions
    )
    embedding = replace(
        embedding,
        flops=embedding.flops + 2.0 * (caption * caption_width * hidden + conditions),
        crossing=float((tokens + caption) * hidden),
    )
    blocks = [_joint_block(f"block {n}", tokens, caption, hidden, ffn) for n in range(layers)]
    # Behind the last, nothing of the caption goes on: no product, no MLP there, and 2 of 6 modulations.
    unused = square + (2 * hidden * ffn + ffn + hidden) + 4 * square
    blocks[-1] = replace(
        blocks[-1],
        parameters=blocks[-1].parameters - unused,
        flops=blocks[-1].flops - 2.0 * (caption * (hidden * hidden + 2 * hidden * ffn) + 4 * square),
        crossing=float(tokens * hidden),
    )
    last = _product("head", tokens, hidden, inner, parameters=2 * square + (hidden + 1) * inner)
    return LayerChain(
        name=name,
        layers=(embedding, *blocks, last),
        sample=f"{side} x {side} latents and {caption} tokens",
        source=source,
    )


def _joint_block(name: str, tokens: int, caption: int, hidden: int, ffn: int) -> Layer:
    """A block of two streams that attend to both; norms have no parameters, but 6 modulations of a stream."""
    both = tokens + caption
    of_image = _block(name, tokens, hidden, ffn, keys=both)
    of_caption = _block(name, caption, hidden, ffn, keys=both)
    modulation = 2 * 6 * (hidden * hidden + hidden)

    def together(field: str) -> float:
        return float(getattr(of_image, field) + getattr(of_caption, field))

    return replace(
        of_image,
        parameters=2 * (of_image.parameters - 4 * hidden) + modulation,
        flops=together("flops") + 2.0 * modulation,
        attention=together("attention"),
        moved=together("moved"),
        product_moved=together("product_moved"),
        kept=together("kept"),
        inputs=together("inputs"),
        crossing=together("crossing"),
        products=of_image.products + of_caption.products - 1 + 2,
        kernels=together("kernels"),
    )


def _check_heads(hidden: int, heads: int) -> None:
    if hidden % heads:
        raise ConfigError(f"a width of {hidden} is not divided by {heads} heads. Check both.")


_DOSOVITSKIY = "Dosovitskiy et al. 2020, arXiv:2010.11929"

ATTENTION_CHAINS = {
    chain.name: chain
    for chain in (
        vision_transformer(
            "vit-l-16",
            layers=24,
            hidden=1024,
            heads=16,
            ffn=4096,
            image=224,
            patch=16,
            source=_DOSOVITSKIY,
        ),
        vision_transformer(
            "vit-h-14",
            layers=32,
            hidden=1280,
            heads=16,
            ffn=5120,
            image=224,
            patch=14,
            source=_DOSOVITSKIY,
        ),
        speech_to_text(
            "whisper-large-v3",
            encoder_layers=32,
            layers=32,
            hidden=1280,
            encoder_heads=20,
            heads=20,
            encoder_ffn=5120,
            ffn=5120,
            vocabulary=51866,
            frames=1500,
            tokens=448,
            mel_bins=128,
            source="Radford et al. 2022, arXiv:2212.04356, and OpenAI 2023",
        ),
        diffusion_transformer(
            "sd3-medium",
            layers=24,
            hidden=1536,
            ffn=6144,
            side=128,
            patch=2,
            channels=16,
            caption=154,
            caption_width=4096,
            pooled_width=2048,
            source="Esser et al. 2024, arXiv:2403.03206",
        ),
    )
}
"""By name."""

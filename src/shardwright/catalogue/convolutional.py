"""Convolutional networks, layer by layer, from the tables of their papers.

A layer is a convolution with its normalisation and activation. It moves its input and output once for the
convolution, the output three times for the normalisation and twice for the activation, and keeps what the
normalisation and the activation need: its output twice.
"""

from dataclasses import dataclass, replace

from shardwright.catalogue.layer_chain import Layer, LayerChain

__all__ = ["CONVOLUTIONAL", "resnet_50", "unet_3d"]

_NORM_AND_ACTIVATION_MOVES = 5


@dataclass(frozen=True, slots=True)
class _Tensor:
    """The output of a layer: channels, and positions of each."""

    channels: int
    positions: int

    @property
    def size(self) -> int:
        return self.channels * self.positions


def _convolution(
    name: str, source: _Tensor, channels: int, *, kernel: int, positions: int, per_channel: int
) -> tuple[Layer, _Tensor]:
    """A convolution, with what follows it; `per_channel`: parameters of a channel besides the kernel."""
    target = _Tensor(channels, positions)
    weights = source.channels * channels * kernel
    layer = Layer(
        name=name,
        parameters=weights + per_channel * channels,
        flops=2.0 * weights * positions,
        moved=source.size + (1 + _NORM_AND_ACTIVATION_MOVES) * target.size,
        kept=2.0 * target.size,
        inputs=source.size,
        crossing=target.size,
    )
    return layer, target


def resnet_50() -> LayerChain:
    """ResNet-50 with the stride in the 3x3 convolutions, for images of 224 x 224.

    Source: He et al. 2016, arXiv:1512.03385, table 1. 25,557,032 parameters and 4.09 GMAC, as widespread
    implementations count them.
    """
    layers: list[Layer] = []

    def add(name: str, source: _Tensor, channels: int, kernel: int, side: int, *, past: int = 0) -> _Tensor:
        layer, made = _convolution(
            name, source, channels, kernel=kernel, positions=side * side, per_channel=2
        )
        layers.append(replace(layer, crossing=layer.crossing + past))
        return made

    x = add("stem", _Tensor(3, 224 * 224), 64, 49, 112)
    x = _Tensor(64, 56 * 56)  # after the pooling
    for number, (width, blocks, side) in enumerate(((64, 3, 56), (128, 4, 28), (256, 6, 14), (512, 3, 7)), 1):
        for block in range(blocks):
            name, before = f"stage {number}.{block}", x
            past = before.size
            inner_side = side * 2 if block == 0 and number > 1 else side
            y = add(f"{name} reduce", x, width, 1, inner_side, past=past)
            y = add(f"{name} 3x3", y, width, 9, side, past=past)
            x = add(f"{name} expand", y, 4 * width, 1, side, past=past if block == 0 else 0)
            if block == 0:
                x = add(f"{name} shortcut", before, 4 * width, 1, side)
    layers.append(
        Layer(
            name="classifier",
            parameters=2048 * 1000 + 1000,
            flops=2.0 * 2048 * 1000,
            moved=x.size + 2048 + 1000,
            kept=2048 + 1000,
            inputs=x.size,
            crossing=1000,
        )
    )
    return LayerChain(
        name="resnet-50",
        layers=tuple(layers),
        sample="image of 224 x 224",
        source="He et al. 2016, arXiv:1512.03385",
    )


def unet_3d() -> LayerChain:
    """The 3-D U-Net for tiles of 132 x 132 x 116 voxels with 3 channels; convolutions without padding.

    Source: Cicek et al. 2016, arXiv:1606.06650, section 2 and figure 2: 19,069,955 parameters, the scales of
    batch normalisation not counted.
    """
    layers: list[Layer] = []
    sides = (132, 132, 116)
    passed: list[tuple[_Tensor, tuple[int, ...]]] = []

    def add(name: str, source: _Tensor, channels: int, kernel: int, shape: tuple[int, ...]) -> _Tensor:
        positions = shape[0] * shape[1] * shape[2]
        biases = 0 if "up" in name else 1
        layer, made = _convolution(
            name, source, channels, kernel=kernel, positions=positions, per_channel=biases
        )
        past = sum(tensor.size for tensor, _ in passed)
        layers.append(replace(layer, crossing=layer.crossing + past))
        return made

    def two(name: str, source: _Tensor, first: int, second: int, shape: tuple[int, ...]) -> _Tensor:
        smaller = tuple(side - 2 for side in shape)
        made = add(f"{name} a", source, first, 27, smaller)
        return add(f"{name} b", made, second, 27, tuple(side - 2 for side in smaller))

    x = _Tensor(3, sides[0] * sides[1] * sides[2])
    shape: tuple[int, ...] = sides
    for level, (first, second) in enumerate(((32, 64), (64, 128), (128, 256))):
        x = two(f"down {level}", x, first, second, shape)
        shape = tuple(side - 4 for side in shape)
        passed.append((x, shape))
        shape = tuple(side // 2 for side in shape)
        x = _Tensor(x.channels, shape[0] * shape[1] * shape[2])
    x = two("bottom", x, 256, 512, shape)
    shape = tuple(side - 4 for side in shape)
    for level in (2, 1, 0):
        shape = tuple(2 * side for side in shape)
        # Each position of the output is made of one position of the input: one tap of the kernel of eight.
        up = add(f"up {level}", x, x.channels, 1, shape)
        skip, _ = passed.pop()  # which the join behind reads
        layers[-1] = replace(layers[-1], parameters=8 * x.channels * x.channels)
        joined = _Tensor(up.channels + skip.channels, up.positions)
        x = two(f"join {level}", joined, skip.channels, skip.channels, shape)
        shape = tuple(side - 4 for side in shape)
    add("classes", x, 3, 1, shape)
    return LayerChain(
        name="unet-3d",
        layers=tuple(layers),
        sample="tile of 132 x 132 x 116 voxels",
        source="Cicek et al. 2016, arXiv:1606.06650",
    )


CONVOLUTIONAL = {chain.name: chain for chain in (resnet_50(), unet_3d())}
"""By name."""

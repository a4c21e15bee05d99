"""The models that are measured: plain PyTorch, a list of layers between a beginning and an end."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "Layered",
    "Task",
    "conv_net",
    "empty_units",
    "equal_blocks",
    "even_stages",
    "gpt",
    "with_adapters",
]


class Layered(nn.Module):
    """Calls `first`, then every layer, then `last`; the two ends may be missing."""

    def __init__(
        self, layers: list[nn.Module], first: nn.Module | None = None, last: nn.Module | None = None
    ):
        super().__init__()
        self.first = first
        self.layers = nn.ModuleList(layers)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        x = x if self.first is None else self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x if self.last is None else self.last(x)


@dataclass(frozen=True, slots=True)
class Task:
    """What is trained.

    Attributes:
        name: for the tables.
        build: makes the model; the same on every rank.
        batch: makes inputs and targets.
        loss: of the model's output and the targets, a mean over samples.
    """

    name: str
    build: Callable[[], Layered]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]


def even_stages(model: Layered, num_stages: int) -> list[list[str]]:
    """Names of the submodules of each stage: equally many layers, the two ends with their neighbours."""
    names = [f"layers.{index}" for index in range(len(model.layers))]
    cuts = [round(stage * len(names) / num_stages) for stage in range(num_stages + 1)]
    stages = [names[a:b] for a, b in pairwise(cuts)]
    if model.first is not None:
        stages[0].insert(0, "first")
    if model.last is not None:
        stages[-1].append("last")
    return stages


# ---- a GPT
# --------------------------------------------------------------------------------------------------


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, vocab: int, length: int, width: int):
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(length, width)

    def forward(self, ids: Tensor) -> Tensor:
        """Their sum."""
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))


class Block(nn.Module):
    """Causal attention and a feed-forward layer, each added to what came in."""

    def __init__(self, width: int, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.norm_1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_1(x)).split(width, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Head(nn.Module):
    """Scores for every token."""

    def __init__(self, width: int, vocab: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return self.scores(self.norm(x))


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def gpt(
    *, layers: int = 12, width: int = 256, vocab: int = 512, length: int = 256, batch: int = 8, name: str = ""
) -> Task:
    """A GPT with learned positions."""

    def build() -> Layered:
        torch.manual_seed(0)
        return Layered(
            [Block(width) for _ in range(layers)], Embedding(vocab, length, width), Head(width, vocab)
        )

    def data() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        ids = torch.randint(0, vocab, (batch, length + 1))
        return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()

    return Task(name or f"GPT {layers} x {width}", build, data, _token_loss)


def equal_blocks(*, layers: int = 8, width: int = 256, length: int = 256, batch: int = 8) -> Task:
    """The blocks of a GPT alone, so that all layers cost the same."""

    def build() -> Layered:
        torch.manual_seed(0)
        return Layered([Block(width) for _ in range(layers)])

    def data() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.randn(batch, length, width), torch.randn(batch, length, width)

    return Task(f"{layers} equal blocks", build, data, F.mse_loss)


def with_adapters(task: Task) -> Task:
    """The same GPT with LoRA of PEFT in all linear layers of its blocks; the rest is frozen."""
    from peft import LoraConfig, get_peft_model  # few need it

    settings = LoraConfig(r=8, target_modules=["qkv", "out", "up", "down"])

    def build() -> Any:
        return get_peft_model(task.build(), settings)

    return replace(task, name=f"{task.name} with LoRA", build=build)


# ---- a conv net
# ---------------------------------------------------------------------------------------------


class ConvBlock(nn.Module):
    """A convolution, batch normalisation, and a pooling that halves the picture where asked."""

    def __init__(self, inside: int, outside: int, *, pool: bool):
        super().__init__()
        self.conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(outside)
        self.pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        x = F.relu(self.norm(self.conv(x)))
        return F.max_pool2d(x, 2) if self.pool else x


class Classifier(nn.Module):
    """Mean over the picture, then scores."""

    def __init__(self, channels: int, classes: int):
        super().__init__()
        self.scores = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return self.scores(x.mean((2, 3)))


def conv_net(*, width: int = 32, size: int = 64, batch: int = 64) -> Task:
    """The 13 convolutions of VGG-16 with batch normalisation, half as wide by default."""
    levels = ((width, 2), (2 * width, 2), (4 * width, 3), (8 * width, 3), (8 * width, 3))

    def build() -> Layered:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        inside = 3
        for outside, number in levels:
            for index in range(number):
                layers.append(ConvBlock(inside, outside, pool=index == number - 1))
                inside = outside
        return Layered(layers, last=Classifier(inside, 10))

    def data() -> tuple[Tensor, Tensor]:
        torch.manual_seed(1)
        return torch.randn(batch, 3, size, size), torch.randint(0, 10, (batch,))

    return Task(f"VGG-16 x {width}/64", build, data, F.cross_entropy)


# ---- hardly a model
# -----------------------------------------------------------------------------------------


class Scale(nn.Module):
    """Multiplies by one number: what runs is the overhead."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        """As the class says."""
        return x * self.factor


def empty_units(units: int = 16) -> Task:
    """Units with one parameter each."""

    def data() -> tuple[Tensor, Tensor]:
        return torch.ones(8, 4), torch.zeros(8, 4)

    return Task(f"{units} empty units", lambda: Layered([Scale() for _ in range(units)]), data, F.mse_loss)

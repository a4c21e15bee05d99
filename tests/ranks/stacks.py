"""A small model of blocks, plain and wrapped, for tests that compare them step by step."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

import shardwright.torch as sw

QUIET = {"run_dir": "off", "profile": "estimated", "microbatches": 4}


WIDTH = 8


TOLERANCE = 1e-10


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def train(model: Any, x: Tensor) -> Tensor:
    """A step with a loss of all outputs."""
    loss: Tensor = model(x).square().mean()
    model.backward(loss)
    return loss


def batches(number: int, num_replicas: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """One batch for each replica, equal on all ranks."""
    torch.manual_seed(100 + number)
    return torch.randn(num_replicas, 8, 5, WIDTH, dtype=dtype)


def start(make: Callable[[], nn.Module], config: Mapping[str, Any]) -> tuple[Any, nn.Module, Any]:
    """The library, a plain model, and the same one wrapped."""
    sw.init({**QUIET, **config})
    torch.manual_seed(0)
    plain = make().double()
    return sw, plain, sw.DistributedModel(copy.deepcopy(plain))


def apart(plain: nn.Module, model: Any) -> list[str]:
    """Names of this rank's parameters whose gradients are not those of the plain model."""
    expected = dict(plain.named_parameters())
    found = []
    for name, parameter in model.local_named_parameters():
        mine, theirs = parameter.grad, expected[name].grad
        if mine is None and theirs is None:
            continue
        if mine is None or theirs is None or (mine - theirs).abs().max().item() > TOLERANCE:
            found.append(name)
    return found

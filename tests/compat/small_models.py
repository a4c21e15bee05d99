"""Small models and loops, as tests of the names of smp run them on each rank, beside plain PyTorch."""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

QUIET: dict[str, Any] = {"run_dir": "off", "profile": "estimated", "timeout_s": 60}
FEATURES = 6


class Net(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh())
        self.second = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def net() -> Net:
    """The same on every rank, in float64."""
    torch.manual_seed(0)
    return Net().double()


def batch(index: int, replica: int = 0, *, size: int = 8) -> tuple[Tensor, Tensor]:
    """Inputs and classes of a replica."""
    generator = torch.Generator().manual_seed(100 * index + replica)
    x = torch.randn(size, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (size,), generator=generator)


def loss_of(model: Callable[[Tensor], Tensor], x: Tensor, y: Tensor) -> Tensor:
    """One number."""
    return nn.functional.cross_entropy(model(x), y)


def plain_gradients(
    model: nn.Module, batches: Sequence[tuple[Tensor, Tensor]], *, microbatches: int, average: bool = True
) -> dict[str, Tensor]:
    """Gradients of the batches of all replicas, as a loop in one process has them."""
    model = copy.deepcopy(model)
    for x, y in batches:
        parts = zip(torch.tensor_split(x, microbatches), torch.tensor_split(y, microbatches), strict=True)
        for x_part, y_part in parts:
            share = len(x_part) / len(x) if average else 1
            (loss_of(model, x_part, y_part) * share / len(batches)).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_difference(model: Any, expected: Mapping[str, Tensor]) -> float:
    """Between the gradients of this rank and what they must be."""
    found = dict(model.local_named_parameters())
    assert found
    return max(float((parameter.grad - expected[name]).abs().max()) for name, parameter in found.items())

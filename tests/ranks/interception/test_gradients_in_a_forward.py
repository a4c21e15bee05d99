"""`torch.autograd.grad` in the middle of a forward: forces are gradients of an energy by positions."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case

from shardwright.testing import RanksFailedError, run_ranks

WIDTH = 12


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Net(nn.Module):
    """Layers behind the forces, which may be on another stage."""

    def __init__(self, energy: type[nn.Module] = Energy) -> None:
        super().__init__()
        self.energy = energy()
        blocks = [nn.Sequential(nn.Linear(3, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)) for _ in range(3)]
        self.tail = nn.Sequential(*blocks)

    def force(self, position: Tensor) -> Tensor:
        position = position.detach().requires_grad_()
        return self.gradient(self.energy(position * 2).sum(), position)

    def forward(self, position: Tensor) -> Tensor:
        return self.tail(self.force(position))

    @staticmethod
    def gradient(y: Tensor, x: Any) -> Any:
        found = torch.autograd.grad(y, x, create_graph=True)
        return found[0] if len(found) == 1 else found


class Strained(Net):
    """Also by the cell, which the positions are multiplied with; through a change in place."""

    def force(self, position: Tensor) -> Tensor:
        strain = torch.zeros(3, 3, dtype=position.dtype)
        strain.requires_grad = True
        position = position.detach().requires_grad_()
        x = position @ (torch.eye(3, dtype=position.dtype) + strain)
        x *= 2
        force, stress = self.gradient(self.energy(x).sum(), (position, strain))
        return force + stress.sum(0)


class Second(Net):
    """A Hessian times a vector, of a tensor whose values Python has looked at."""

    def force(self, position: Tensor) -> Tensor:
        position = position.detach().requires_grad_()
        x = position.sin()
        scale = int((x > 0.5).sum()) + 1
        first = self.gradient(self.energy(x).sum() / scale, position)
        return self.gradient((first * torch.ones_like(first)).sum(), position)


class Transforms(nn.Module):
    """A module that takes gradients by `torch.func` inside."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = Energy()

    def forward(self, position: Tensor) -> Tensor:
        return torch.func.grad(lambda p: self.energy(p * 2).sum())(position)


class Functional(Net):
    def __init__(self) -> None:
        super().__init__(Transforms)

    def force(self, position: Tensor) -> Tensor:
        return self.energy(position)


class Transformed(Net):
    def force(self, position: Tensor) -> Tensor:
        return torch.func.grad(lambda p: self.energy(p).sum())(position)


class WithBackward(Net):
    def force(self, position: Tensor) -> Tensor:
        position = position.detach().requires_grad_()
        self.energy(position * 2).sum().backward()
        return position.grad


def batch(batch_size: int, length: int) -> dict[str, Tensor]:
    return {"position": torch.randn(batch_size, 4, 3), "target": torch.randn(batch_size, 4, 3)}


def force_matching(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["position"]) - batch["target"]).square().mean()


def gradient_penalty(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In the loss, outside of the model, which is called on other tensors as well."""
    inner = model.get_module() if hasattr(model, "get_module") else model
    mixed = (0.3 * batch["position"] + 0.7 * batch["target"]).requires_grad_()
    slope = Net.gradient(inner.energy(mixed * 1.5).sum(), mixed)
    return force_matching(model, batch) + (slope.flatten(1).norm(dim=1) - 1).square().mean()


def check(
    build: Callable[[], nn.Module],
    pipeline: str = "1f1b",
    *,
    loss: Any = force_matching,
    ranks: int = 2,
    **more: Any,
) -> None:
    config = {"microbatches": 4, "profile": "estimated", "pipeline": pipeline, **more}
    case = Case(config=config, iterations=(Iteration(), Iteration()))
    recipe = Recipe(build=build, batch=batch, loss=loss)
    assert run_ranks(differences_by_case, ranks, recipe, {"": case}, timeout_s=60) == [{}] * ranks


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "pipeline"),
    [
        (Net, "1f1b"),
        (Strained, "zb_h1"),
        (Second, "1f1b"),
        (Functional, "zb_h1"),
    ],
)
def test_a_gradient_by_the_batch_through_operations_between_units(build, pipeline):
    """What a unit was traced on did not know that it came from the positions: "not used in the graph"."""
    check(build, pipeline)


def test_a_gradient_through_what_is_recomputed():
    """The forward that ran again counted as one of the step function, or PyTorch refused its hooks."""
    check(Net, activation_checkpointing="full")


def test_a_gradient_in_the_loss_over_replicas():
    check(Net, loss=gradient_penalty, ranks=4, data_parallel_degree=2)


def inner_energy(model: nn.Module, position: Tensor) -> Tensor:
    """Of a part that is called alone, as a discriminator is."""
    inner = model.get_module() if hasattr(model, "get_module") else model
    return inner.energy(position)


def energy_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return inner_energy(model, batch["position"]).square().mean()


def test_a_part_that_is_called_alone_is_split():
    """Shares of work were those of a model that nobody calls: 0, too small to be split."""
    check(Net, loss=energy_alone)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            WithBackward,
            r"gradient of a tensor is used behind backward\(\).*torch\.autograd\.grad\(y\.sum\(\), x",
        ),
        (Transformed, r"uses torch\.func .* Move this code and these modules into a module of their own"),
    ],
)
def test_what_cannot_be_split_is_refused_with_the_remedy(build, message):
    """They ended in an error of a later layer (NoneType), or asked to open an issue for PyTorch."""
    with pytest.raises(RanksFailedError, match=message):
        check(build)

"""Under zero-bubble schedules a unit may do with gradients and weights what it likes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import Case, Recipe, differences, differences_by_case
from zoo import classify, features
from zoo_modules import WIDTH, Stack

from shardwright.testing import run_ranks


class Linears(nn.Module):
    """What the blocks below vary: two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def energy(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().sum()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def _with_gradient(x: Tensor) -> Tensor:
    return x if x.requires_grad else x.detach().requires_grad_()


class TakesAForce(Linears):
    """A gradient with respect to the input is part of the result, as in models of energies."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_grad_enabled():
            return x
        x = _with_gradient(x)
        (force,) = torch.autograd.grad(self.energy(x), x, create_graph=True)
        return x - 0.1 * force


class DifferentiatesByWeights(Linears):
    """One step of gradient descent on its own weights inside the forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            weights = (self.up.weight, self.down.weight, self.down.bias)
            up, down, bias = torch.autograd.grad(self.energy(x), weights, create_graph=True)
        y = F.linear(x, self.up.weight - 0.01 * up, self.up.bias)
        return x + F.linear(torch.tanh(y), self.down.weight - 0.01 * down, self.down.bias - 0.01 * bias)


class BackwardInside(Linears):
    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            self.energy(inner).backward(inputs=[inner])
        return super().forward(x) - 0.1 * inner.grad


class _Inverse(torch.autograd.Function):
    """Computes its module again in the backward, and asks for the gradients of its weights itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        with torch.no_grad():
            return module(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.module(x)
        grad_x, *rest = torch.autograd.grad(y, (x, *ctx.module.parameters()), gradients)
        return grad_x, None, *rest


class ReversesByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Linears()

    def forward(self, x: Tensor) -> Tensor:
        return x + _Inverse.apply(_with_gradient(x), self.inner, *self.inner.parameters())


class Functional(nn.Module):
    """`torch.func`: sample by sample, and with other weights in place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Linears()

    def forward(self, x: Tensor) -> Tensor:
        halved = {name: 0.5 * weight for name, weight in self.inner.named_parameters()}
        return torch.func.vmap(self.inner)(x) - torch.func.functional_call(self.inner, halved, (x,))


class Forwards(Linears):
    """A derivative in forward mode."""

    def forward(self, x: Tensor) -> Tensor:
        y, slope = torch.func.jvp(super().forward, (x,), (torch.ones_like(x),))
        return y + 0.1 * slope


class Hooked(Linears):
    """Hooks on what it computes."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 0.5 * gradient)
        return x + self.down(torch.tanh(y))


class SharesWeights(Linears):
    """Weights used twice, by a function as well, and in a norm."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        y = y + F.linear(torch.tanh(self.up(y)), self.down.weight) * self.up.weight.norm()
        return x + y + 0.1 * self.down.bias.square()


class Normalised(Linears):
    """Weights that are computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)
        self.down = nn.utils.parametrizations.orthogonal(self.down)


def _halve(weight: Tensor) -> None:
    weight.grad.mul_(0.5)


class Listens(Linears):
    """Its weights have hooks: on the gradient, and after it was added."""

    def __init__(self) -> None:
        super().__init__()
        self.listening = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.listening:
            self.listening = True
            self.up.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
            self.down.weight.register_post_accumulate_grad_hook(_halve)
        return super().forward(x)


ANY = (
    *(TakesAForce, DifferentiatesByWeights, BackwardInside, ReversesByHand),
    *(Hooked, SharesWeights, Normalised, Listens, Functional),
)


class Of(Stack):
    """Several blocks of each kind, so that each is a unit."""

    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(kind() for kind in kinds for _ in range(max(2, 8 // len(kinds))))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(F.layer_norm(x, (WIDTH,)))
        return self.head(x)


def check(
    kinds: tuple[type[nn.Module], ...], settings: dict[str, dict[str, Any]], num_ranks: int = 2
) -> None:
    recipe = Recipe(build=lambda: Of(*kinds), batch=features, loss=classify)
    cases = {
        name: Case(config={"microbatches": 4, "profile": "estimated", **more})
        for name, more in settings.items()
    }
    assert run_ranks(differences_by_case, num_ranks, recipe, cases, timeout_s=60) == [{}] * num_ranks


@pytest.mark.thorough
def test_units_may_take_gradients_and_share_weights():
    check(ANY, {"zb_v": {"pipeline": "zb_v"}})


class UsesAnInnerModule(Of):
    """The model calls a module inside its first unit once more, as it does anything else."""

    def __init__(self) -> None:
        super().__init__(Linears)

    def forward(self, x: Tensor) -> Tensor:
        first: Any = self.blocks[0]
        return super().forward(x) + first.up(x).mean()


def test_code_between_units_may_call_a_module_inside_one():
    recipe = Recipe(build=UsesAnInnerModule, batch=features, loss=classify)
    case = Case(config={"microbatches": 4, "profile": "estimated", "pipeline": "zb_h1"})
    assert run_ranks(differences, 2, recipe, case, timeout_s=60) == [[], []]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by PyTorch itself
def test_units_may_differentiate_forwards():
    check((Forwards,), {"zb_h1": {"pipeline": "zb_h1"}})


@pytest.mark.thorough
def test_replicas_wait_for_every_use_of_a_weight():
    plain = {"pipeline": "zb_v", "pipeline_parallel_degree": 2}
    recomputed = {**plain, "pipeline": "zb_h1", "activation_checkpointing": "full"}
    check((SharesWeights, TakesAForce), {"plain": plain, "recomputed": recomputed}, num_ranks=4)

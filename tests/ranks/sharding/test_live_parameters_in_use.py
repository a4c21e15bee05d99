"""Shared parameters that come and go in a step, in code that does unusual things with them."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded import VOCABULARY, Net, batches, loss_of
from test_live_parameters import start, trains_the_same
from torch import Tensor, nn

from shardwright.testing import RanksFailedError, run_ranks

FEW = 600
"""A bound that few parameters fit in."""


class Mixed(nn.Module):
    """Autograd saves its parameters as they are, not views of them."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.scales = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(4))
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(3))
        self.norm = nn.GroupNorm(4, width)
        self.mix = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for scale in self.scales:
            h = h + torch.tanh(h * scale)
        h = h.transpose(1, 2)
        for convolution in self.convolutions:
            h = h + torch.tanh(convolution(h))
        h = self.mix(self.norm(h).transpose(1, 2))
        return F.linear(h, self.embedding.weight)


def mixed(microbatches):
    torch.manual_seed(0)
    trains_the_same(Mixed(), loss_of, {"sdp_max_live_parameters": FEW, "microbatches": microbatches})


@pytest.mark.parametrize("microbatches", [1, 2])
def test_parameters_are_saved_as_they_are(microbatches):
    run_ranks(mixed, 2, microbatches)


def forces():
    """A model that differentiates in its forward, as those of molecules do."""

    class Forces(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 1)
            )
            self.scale = nn.Parameter(torch.randn(40))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = (self.layers[0](x) * self.scale).sin().sum() + self.layers(x).sum()
                return torch.autograd.grad(energy, x)[0]

    torch.manual_seed(0)
    model = Forces()
    sw, plain, wrapped = start({"sdp_max_live_parameters": FEW}, model)

    @sw.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    x = torch.randn(4, 8, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(evaluate(wrapped, x).concat(), plain(x))
        torch.testing.assert_close(wrapped(x), plain(x))


def test_a_forward_that_differentiates_in_an_evaluation():
    run_ranks(forces, 2)


def fails_and_goes_on(where, every):
    settings = {"microbatches": 2, "every": every, "bucket": 1200}
    sw, plain, model = start({**settings, "sdp_max_live_parameters": FEW}, Net())
    calls = []

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            raise ValueError("on purpose")

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        calls.append(1)
        fails = len(calls) == 2
        if fails and where == "forward":
            raise ValueError("on purpose")
        inner = model.module
        h = inner.embedding(x)
        for index, block in enumerate(inner.blocks):
            h = Fails.apply(block(h)) if fails and index == 1 else block(h)
        loss = F.cross_entropy(F.linear(h, inner.embedding.weight).flatten(0, 1), y.flatten())
        model.backward(loss)
        return loss

    (x, y), (x2, y2) = batches(2)
    with pytest.raises(ValueError, match="on purpose"):
        train(model, x, y)
    model.zero_grad()
    train(model, x2, y2)
    h = plain.embedding(x2)
    for block in plain.blocks:
        h = block(h)
    F.cross_entropy(F.linear(h, plain.embedding.weight).flatten(0, 1), y2.flatten()).backward()
    others = dict(plain.named_parameters())
    for name, parameter in model.module.named_parameters():
        expected = others[name].grad
        if expected is not None:
            found = parameter.grad.full() if hasattr(parameter.grad, "full") else parameter.grad
            torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("where", "every"), list(product(["forward", "backward"], [False, True])))
def test_a_step_after_one_that_failed(where, every):
    run_ranks(fails_and_goes_on, 2, where, every)


def transforms():
    def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
        inner = getattr(model, "module", model)
        h = inner.embedding(x)
        slope = torch.func.grad(lambda z: inner.mix(z).square().sum())(h.detach())
        return loss_of(model, x, y) + slope.square().mean()

    trains_the_same(Net(), loss, {"sdp_max_live_parameters": FEW})


def test_transforms_of_functions():
    with pytest.raises(RanksFailedError, match="raise sdp_max_live_parameters"):
        run_ranks(transforms, 2)

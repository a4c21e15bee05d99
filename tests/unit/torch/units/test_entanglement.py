"""Modules whose own code reaches into the modules inside them are kept whole."""

import logging

import pytest
import torch
from torch import nn
from torch.func import functional_call

from shardwright.errors import TraceError
from shardwright.torch.units.model_traces import discover
from shardwright.torch.units.unit_choice import choose_units

WIDTH = 4


class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state = None
        self.calls = 0

    def forward(self, x):
        if self.state is not None:
            x = x + self.state
        self.state = self.linear(x)
        self.calls += 1
        return self.state


class Plain(nn.Module):
    """A module may keep what it likes in its own attributes, and plain values in those of others."""

    def __init__(self):
        super().__init__()
        self.first, self.cell = nn.Linear(WIDTH, WIDTH), Cell()

    def forward(self, x):
        x = self.first(x)
        self.seen = x
        self.cell.calls = 0
        return self.cell(x)


class Resets(Plain):
    def forward(self, x):
        x = self.first(x)
        self.cell.state = None
        return self.cell(x)


class Within(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.result = module(ctx.inner)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx, gradient):
        ctx.result.backward(gradient)
        return ctx.inner.grad, None


class Reverses(Plain):
    def forward(self, x):
        return Within.apply(self.first(x), self.cell)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Activates(Plain):
    """A custom function that calls no module is an operation as any other."""

    def forward(self, x):
        return Square.apply(super().forward(x))


class LooksAtValues(Resets):
    def forward(self, x):
        return super().forward(x) if x.sum() > -1e9 else x


def whole(*modules: nn.Module) -> list[str]:
    model = nn.Sequential(*modules)
    arguments = ((torch.ones(2, WIDTH),), {})
    costs = discover(model, lambda x: model(x), arguments, device=torch.device("cpu"))
    names = [name for name, cost in costs.items() if cost.whole]
    units = choose_units(model, costs, num_stages=2 * len(modules))
    assert set(names) <= set(units)
    return names


def test_a_module_that_keeps_tensors_in_another_one_is_whole():
    assert whole(Plain(), Resets(), nn.Linear(WIDTH, WIDTH)) == ["1"]


def test_a_module_that_calls_others_from_an_autograd_function_is_whole():
    assert whole(Plain(), Reverses(), Activates()) == ["1"]


def test_it_is_seen_also_where_fake_tensors_cannot_get_through():
    assert whole(Plain(), LooksAtValues()) == ["1"]


def test_the_model_itself_is_warned_about(caplog):
    model = Reverses()
    with caplog.at_level(logging.WARNING, "shardwright"):
        costs = discover(model, lambda x: model(x), ((torch.ones(2, WIDTH),), {}), device=torch.device("cpu"))
    assert "calls modules inside it from an autograd.Function" in caplog.text
    assert choose_units(model, costs, num_stages=8) == ["first", "cell.linear"]


def test_the_model_itself_may_keep_tensors_anywhere(caplog):
    """Each microbatch has its own attributes: a model that resets its cells was warned about."""
    model = Resets()
    with caplog.at_level(logging.WARNING, "shardwright"):
        discover(model, lambda x: model(x), ((torch.ones(2, WIDTH),), {}), device=torch.device("cpu"))
    assert not caplog.text


def with_computed_weight(model, x):
    weight = model.first.weight * x.mean()
    return functional_call(model, {"cell.linear.weight": weight}, (x,))


@pytest.mark.parametrize(
    "function",
    [
        with_computed_weight,
        lambda model, x: functional_call(model.cell, dict(model.cell.named_parameters()), (x,)),
        lambda model, x: torch.func.vmap(model)(x),
        lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
        lambda model, x: torch.func.jacrev(torch.sin)(model(x)),
    ],
)
def test_a_step_function_uses_no_function_transforms(function):
    """Microbatches found each other's weights under `functional_call`, and the model kept one for good."""
    model = Plain()
    with pytest.raises(TraceError, match=r"test_entanglement\.py:\d+: .*torch\.func"):
        discover(
            model, lambda x: function(model, x), ((torch.ones(2, WIDTH),), {}), device=torch.device("cpu")
        )

"""Optimizers that need all parameters, where ranks have some: each rank made an algorithm of its own."""

import copy
import itertools
from typing import Any

import pytest
import torch
from stacks import WIDTH, Stack, batches, start
from stacks import train as squares
from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.testing import RanksFailedError, run_ranks

DP = {"data_parallel_degree": 2}


def with_gradients(optimizer: Optimizer) -> list[Any]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Distance(Optimizer):
    """Has its step size in tensors, as DoG has, and averages that it does not make from the parameters."""

    def __init__(self, params: Any):
        super().__init__(params, {"lr": 1.0, "squares": None, "distance": None})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        parameters = with_gradients(self)
        for p in parameters:
            if not self.state[p]:
                average = torch.zeros(p.shape, dtype=p.dtype, device=p.device)
                self.state[p].update(start=p.clone(), averages=[average], step=torch.tensor(0.0))
        norm = torch.stack(torch._foreach_norm([p.grad for p in parameters])).norm()
        distance = torch.stack([(p - self.state[p]["start"]).norm() for p in parameters]).norm()
        for group in self.param_groups:
            before, squares = group["distance"], group["squares"]
            group["squares"] = norm**2 if squares is None else squares + norm**2
            group["distance"] = (
                distance.clamp(min=1e-3) if before is None else torch.maximum(before, distance)
            )
            rate = group["lr"] * group["distance"] / group["squares"].sqrt()
        for p in parameters:
            self.state[p]["averages"][0].mul_(0.9).add_(p.grad, alpha=0.1)
            self.state[p]["step"] += 1
            p.sub_(self.state[p]["averages"][0] * rate)


class Sam(Optimizer):
    """Climbs along the gradient of all parameters, then descends by another optimizer."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        device = self.param_groups[0]["params"][0].device
        norms = [p.grad.norm().to(device) for p in with_gradients(self)]
        for p in with_gradients(self):
            p.add_(p.grad / torch.stack(norms).norm().to(p))

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.base.step()


class SamWithClosure(Sam):
    """As it is published: `step` wants a closure."""

    @torch.no_grad()
    def second_step(self) -> None:
        self.base.step()

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None, "SAM needs a closure"
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Net(Stack):
    """With a parameter that is 0, one that has no gradient, and one without a place in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(WIDTH))
        self.blocks[0].up.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.zero[:3]


def numbers_of(optimizer: Optimizer) -> list[float]:
    """The numbers of its groups."""
    values = [value for group in optimizer.param_groups for name, value in group.items() if name != "params"]
    return [float(value) for value in values if isinstance(value, int | float | Tensor)]


def train_with(
    kind: Any, config: dict[str, Any], net: Any = Net, *, wrapped: bool = True, other_order: bool = False
) -> tuple[float, bool, int]:
    """The largest difference from a plain loop, whether numbers of groups are alike, and how many states."""
    sw, plain, model = start(net, config)
    parameters = list(model.module.parameters())
    own = kind(parameters[::-1] if other_order and sw.rank() else parameters)
    optimizer = sw.DistributedOptimizer(own) if wrapped else own
    theirs = kind(plain.parameters())

    train = sw.step(squares)
    for number in range(4):
        both = batches(number, sw.dp_size())
        for each in (optimizer, theirs):
            each.zero_grad()
        train(model, both[sw.dp_rank()])
        for part in both.flatten(0, 1).tensor_split(4 * sw.dp_size()):
            (plain(part).square().mean() / 4 / sw.dp_size()).backward()
        for each in (optimizer, theirs):
            if kind is Sam:
                each.first_step()
            each.step()
        for each in (optimizer, theirs) if number == 1 and wrapped else ():
            each.load_state_dict(copy.deepcopy(each.state_dict()))
    state = model.state_dict()
    difference = max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())
    alike = numbers_of(own) == pytest.approx(numbers_of(theirs), rel=1e-9)  # kernels look at alignment
    return difference, alike, len(own.state)


@pytest.mark.parametrize("kind", [Distance, Sam])
def test_over_stages_they_are_refused(kind):
    """Bug: each rank had norms and step sizes of its own parameters."""
    with pytest.raises(
        RanksFailedError, match=rf"{kind.__name__} updates each parameter by what.*pipeline_parallel_degree 1"
    ):
        run_ranks(train_with, 2, kind, {})


def stepping(kind: Any, way: str, config: dict[str, Any]) -> float:
    """With an optimizer that is not wrapped; returns the largest difference from a plain loop."""
    sw, plain, model = start(Stack, config)
    train = sw.step(squares)
    train(model, batches(0, 1)[0])
    mine = kind(list(model.local_parameters()))
    theirs = kind(plain.parameters())

    def compute(optimizer: Any, number: int) -> float:
        optimizer.zero_grad()
        if optimizer is mine:
            return float(train(model, batches(number, 1)[0]).reduce_mean())
        losses = [plain(part).square().mean() for part in batches(number, 1)[0].tensor_split(4)]
        loss = torch.stack(losses).mean()
        loss.backward()
        return loss.item()

    for number, optimizer in itertools.product(range(2), (mine, theirs)):
        compute(optimizer, number)
        if way == "closure":
            optimizer.step(lambda optimizer=optimizer, number=number: compute(optimizer, number))
        else:
            optimizer.first_step()
            compute(optimizer, number)
            optimizer.second_step()
    state = model.state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


WAYS = [(SamWithClosure, "closure"), (torch.optim.LBFGS, "closure")]


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_an_optimizer_that_is_not_wrapped_and_needs_all_parameters(kind, way):
    """It could not be tried, or nobody heard of its methods; LBFGS was to be wrapped, which is refused."""
    says = "Leave it unwrapped" if kind is torch.optim.LBFGS else "Train by replicas"
    with pytest.raises(
        RanksFailedError, match=rf"{kind.__name__} updates each parameter by what it knows of all.* {says}"
    ):
        run_ranks(stepping, 2, kind, way, {})


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_it_is_exact_over_replicas(kind, way):
    for difference in run_ranks(stepping, 2, kind, way, DP):
        assert difference < 1e-10


class NeedsGraph(torch.optim.SGD):
    """Wants second derivatives, as Sophia does: it cannot be tried."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("gradients have no graph")


def untried() -> None:
    sw, _, model = start(Stack, {})
    sw.step(squares)(model, batches(0, 1)[0])
    sw.DistributedOptimizer(NeedsGraph(model.parameters())).step()


def test_what_cannot_be_tried_is_refused():
    with pytest.raises(
        RanksFailedError,
        match=r"NeedsGraph could not be tried .*no graph.*sums_over_stages = True on NeedsGraph",
    ):
        run_ranks(untried, 2)

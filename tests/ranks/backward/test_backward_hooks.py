"""Hooks for gradients: of modules, and of parameters."""

import re
from typing import Any

import pytest
from stacks import apart, batches, start
from stacks import train as squares
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import Block, Stack

from shardwright.errors import UsageError
from shardwright.testing import RanksFailedError, run_ranks

CASE = Case(
    config={"microbatches": 4, "profile": "estimated", "pipeline": "zb_v"}, iterations=[Iteration()] * 2
)


def clamp_gradient(module: nn.Module, given: Any, made: Any) -> tuple[Tensor]:
    return (given[0].clamp(-1e-4, 1e-4) + made[0].clamp(-1e-5, 1e-5),)


class HookedBlock(Stack):
    """A block is most of a stage: its parts would be placed one by one."""

    def __init__(self) -> None:
        super().__init__(5)
        self.blocks[1].register_full_backward_hook(clamp_gradient)


class HookedBody(Stack):
    """All of the blocks: more than a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*self.blocks)
        self.body.register_full_backward_hook(clamp_gradient)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.requires_grad_()))


class Doubled(Block):
    """A hook changes what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda module, given, made: made * 2)
        self.register_full_backward_hook(clamp_gradient)


class HookedTwice(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2] = Doubled()


def differences_or_refusals() -> list[str]:
    found = []
    for build in (HookedBlock, HookedBody, HookedTwice):
        try:
            found += differences(Recipe(build=build, batch=features, loss=classify), CASE)
        except UsageError as error:
            found.append(str(error))
    return found


def test_backward_hooks_of_modules():
    """The first was an AssertionError of PyTorch, and the last was given the gradient of another tensor."""
    for found in run_ranks(differences_or_refusals, 2):
        body, twice = found
        assert re.search(r"calls a module that has a backward hook .* no rank would have all", body)
        assert twice.startswith("a forward hook changes the result of a Doubled that also has a backward")


def clamp_accumulated(parameter: Tensor) -> None:
    parameter.grad.clamp_(-1e-3, 1e-3)


def train_with_accumulation_hooks(config: dict[str, Any]) -> list[str]:
    sw, plain, model = start(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), config)
    for module in (plain, model.module):
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(clamp_accumulated)
    train = sw.step(squares)
    for number in range(2):
        (x,) = batches(number, 1)
        train(model, x)
        for part in x.tensor_split(4):
            (plain(part).square().mean() / 4).backward()
    return apart(plain, model)


def test_hooks_for_accumulated_gradients():
    """Each replica called them with its own part, and with that of the last call alone."""
    assert run_ranks(train_with_accumulation_hooks, 2, {"pipeline": "zb_v"}) == [[], []]
    message = r"the parameter 0\.weight has a hook for its accumulated gradient .* several replicas"
    for num_ranks in (2, 4):
        with pytest.raises(RanksFailedError, match=message):
            run_ranks(train_with_accumulation_hooks, num_ranks, {"data_parallel_degree": 2})

"""What changes a model when its plan is made, before the first microbatch runs.

The planner has traced the model. That trace places its units, and serves the first batch too unless hooks, a
state that waits to be loaded, or the values of other ranks have made another model of it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stacks import TOLERANCE, Stack, apart, batches, start
from torch import Tensor, nn

from shardwright.testing import run_ranks


class SkipsBlocks(Stack):
    """Runs the blocks that an attribute leaves."""

    skipped = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[self.skipped :]:
            x = block(x)
        return self.head(x)


class FirstHalfFrozen(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[:2].requires_grad_(False)


class DrawsAsOftenAsItSays(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("num_draws", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.randn(int(self.num_draws), dtype=x.dtype).sum()


def skip_a_block(model: nn.Module) -> None:
    model.skipped = 1


def thaw(model: nn.Module) -> None:
    model.requires_grad_(True)


def first_step_after(make: Callable[[], nn.Module], change: Callable[[nn.Module], None]) -> list[str]:
    """What is wrong in a first step before which a hook has changed the model."""
    sw, plain, model = start(make, {})
    model.register_post_partition_hook(lambda wrapped, _: change(wrapped.module))
    change(plain)
    return differences_in_one_step(sw, plain, model)


def differences_in_one_step(sw: Any, plain: nn.Module, model: Any) -> list[str]:
    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    (x,) = batches(0, 1)
    torch.manual_seed(3)
    losses = train(model, x).outputs
    torch.manual_seed(3)
    found = []
    for number, part in enumerate(x.tensor_split(4)):
        expected = plain(part).square().mean()
        (expected / 4).backward()
        if (losses[number] - expected).abs().item() > TOLERANCE:
            found.append(f"loss of microbatch {number}")
    return found + apart(plain, model)


@pytest.mark.parametrize(
    ("make", "change"), [(SkipsBlocks, skip_a_block), (FirstHalfFrozen, thaw)], ids=["path", "gradients"]
)
def test_a_hook_changes_the_model_before_its_first_step(make, change):
    """The planner's trace was run, which knew nothing of it: half of the model was not trained."""
    assert run_ranks(first_step_after, 2, make, change) == [[], []]


def first_step_after_ranks_have_agreed() -> list[str]:
    def make() -> nn.Module:
        model = DrawsAsOftenAsItSays()
        model.num_draws.fill_(3 + 2 * dist.get_rank())
        return model

    sw, plain, model = start(make, {})
    plain.num_draws.fill_(3)
    return differences_in_one_step(sw, plain, model)


def test_ranks_have_the_values_of_the_first_one_in_their_first_step():
    """The second one ran what it had traced with its own."""
    assert run_ranks(first_step_after_ranks_have_agreed, 2) == [[], []]

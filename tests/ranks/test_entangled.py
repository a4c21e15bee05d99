"""Modules that cannot be split, and operations between units that need data, over two stages."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transparency import Case, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import WIDTH, Block, Stack

from shardwright.testing import run_ranks

SCHEDULES = ("1f1b", "zb_v")


def check(recipe: Recipe) -> None:
    cases = {k: Case(config={"microbatches": 4, "profile": "estimated", "pipeline": k}) for k in SCHEDULES}
    assert run_ranks(differences_by_case, 2, recipe, cases) == [{}, {}]


class Cell(nn.Module):
    """Adds what it remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + (0.0 if self.state is None else self.state)
        self.state = y.mean(1, keepdim=True)
        return y


class RemembersBlock(nn.Module):
    """Makes its cell forget, as RecurrentGemma does, calls it twice, and leaves what it has seen there."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.cell = Block(), Block(), Cell()

    def forward(self, x: Tensor) -> Tensor:
        self.cell.state = None
        x = x + self.cell(self.first(x))
        return x + self.cell(self.second(x))


class Remembers(Stack):
    def __init__(self) -> None:
        super().__init__(num_blocks=0)
        self.blocks = nn.ModuleList(RemembersBlock() for _ in range(3))


class _Reversible(torch.autograd.Function):
    """Keeps only the result, and computes the inputs of every block anew in the backward."""

    @staticmethod
    def forward(ctx, left, right, blocks):
        with torch.no_grad():
            for block in blocks:
                left, right = right, left + block(right)
        ctx.blocks = blocks
        ctx.save_for_backward(left, right)
        return left, right

    @staticmethod
    def backward(ctx, grad_left, grad_right):
        left, right = ctx.saved_tensors
        for block in reversed(ctx.blocks):
            before = left.detach().requires_grad_()
            with torch.enable_grad():
                inner = block(before)
            inner.backward(grad_right)
            left, right = right - inner.detach(), before.detach()
            grad_left, grad_right = grad_right, grad_left + before.grad
        return grad_left, grad_right, None


class ReversibleLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return sum(_Reversible.apply(x, x.clone(), self.layers))


class Reverses(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.middle = ReversibleLayers()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[:3]:
            x = block(x)
        x = self.middle(x)
        for block in self.blocks[3:]:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("build", [Remembers, Reverses])
def test_modules_that_cannot_be_split_are_kept_whole(build):
    check(Recipe(build=build, batch=features, loss=classify))


def spoken(batch_size: int, length: int) -> dict[str, Tensor]:
    lengths = torch.randint(1, 4, (batch_size,))
    targets = torch.randint(1, 7, (batch_size, 4)) * (torch.arange(4) < lengths[:, None])
    return {"x": torch.randn(batch_size, length, WIDTH), "targets": targets}


def connectionist(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As in Hugging Face's Wav2Vec2ForCTC: targets without padding, in one row."""
    scores = model(batch["x"]).log_softmax(-1).transpose(0, 1)
    there = batch["targets"] != 0
    lengths = torch.full((scores.shape[1],), scores.shape[0])
    return F.ctc_loss(scores, batch["targets"].masked_select(there), lengths, there.sum(-1))


def test_a_loss_without_a_fake_kernel_is_computed_between_units():
    check(Recipe(build=Stack, batch=spoken, loss=connectionist))

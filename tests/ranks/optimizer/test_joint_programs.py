"""Optimizers over all stages, as people write them, with numbers, lists and other optimizers."""

import itertools
import math
from typing import Any

import pytest
import torch
from stacks import WIDTH, Stack, batches, start
from test_joint_updates import BOTH, Sam, train_with, trainer, with_gradients
from torch import Tensor, nn
from torch.optim import Optimizer

from choices import in_sweep
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.optimizer.optimizer_trial import trial


class Rated(Optimizer):
    """Goes along each gradient by a rate of all of them."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        rate = self.rate([p.grad for p in with_gradients(self)])
        for p in with_gradients(self):
            p.sub_(p.grad * rate, alpha=1e-2)

    def rate(self, gradients: list[Tensor]) -> Any:
        return 1 / torch.stack([g.norm() for g in gradients]).norm()


class Compares(Rated):
    """Python asks a stand-in first: ranks compared a with b and b with a, and were told that they differ."""

    def rate(self, gradients: list[Tensor]) -> Any:
        norms = [g.norm() for g in gradients]
        least, *_, most = sorted(norms)
        best = norms[0]
        for norm in norms:
            if norm >= best and norm != least:
                best = norm
        return 1 / (max(norms) + most + best + least)


class OneElement(Rated):
    """Numbers are tensors of one element as well."""

    def rate(self, gradients: list[Tensor]) -> Any:
        flat = torch.cat([g.norm().view(1) for g in gradients])
        return 1 / (flat.norm() + torch.cat([g.flatten().norm(dim=0, keepdim=True) for g in gradients]).max())


class Prints(Rated):
    def rate(self, gradients: list[Tensor]) -> Any:
        return 1 / math.hypot(*(float(f"{g.norm():.12f}") for g in gradients))


class ClipsLarge(torch.optim.SGD):
    """Clips at a norm that small gradients of a trial did not reach: it was taken for harmless."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for p in with_gradients(self)]).norm()
        for p in with_gradients(self):
            p.sub_(p.grad * torch.clamp(50.0 / norm, max=1.0), alpha=0.1)


class SecondGroup(torch.optim.SGD):
    """Only parameters of a later group are coupled: the first parameter of all was the only one looked at."""

    def __init__(self, params: Any):
        first, *others = params
        super().__init__([{"params": [first], "scaled": False}, {"params": others, "scaled": True}], lr=0.1)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            own = [p for p in group["params"] if p.grad is not None]
            norm = torch.stack([p.grad.norm() for p in own]).norm() if group["scaled"] else 1.0
            for p in own:
                p.sub_(p.grad / norm, alpha=1e-2)


class Several(Optimizer):
    """Puts optimizers together; those in a list were tried on copies of the real parameters."""

    def __init__(self, params: Any):
        everything = list(params)
        self.optimizers = [
            torch.optim.AdamW([p for p in everything if p.ndim != 2], lr=1e-2),
            Rated([p for p in everything if p.ndim == 2]),
        ]
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in self.optimizers:
            each.step()


class Untried(Rated):
    """Has buffers of the real shapes: it cannot be tried, and was taken for harmless."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.averages = [torch.zeros(p.shape, dtype=p.dtype) for p in self.param_groups[0]["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p, average in zip(self.param_groups[0]["params"], self.averages, strict=True):
            if p.grad is not None:
                average.lerp_(p.grad, 0.5)
        super().step()


class Counts(Rated):
    """Counts the steps of its first parameter, in a state."""

    def rate(self, gradients: list[Tensor]) -> Any:
        state = self.state[with_gradients(self)[0]]
        state["steps"] = state.get("steps", 0) + 1
        return super().rate(gradients) / state["steps"]


@pytest.mark.parametrize(
    "kind",
    [Compares, in_sweep(OneElement), in_sweep(Prints), in_sweep(SecondGroup), Several, Untried],
    ids=lambda k: k.__name__,
)
def test_they_are_those_of_the_whole_model(kind):
    for difference, alike, _ in run_ranks(train_with, 2, kind, {}):
        assert difference < 1e-10
        assert alike


def test_what_only_large_gradients_show():
    assert trial(ClipsLarge([nn.Parameter(torch.ones(4, 4))], lr=0.1)).couples


@pytest.mark.thorough
def test_over_stages_and_replicas():
    for difference, alike, _ in run_ranks(train_with, 4, Compares, BOTH):
        assert difference < 1e-10
        assert alike


class Tied(nn.Module):
    """Trains a weight that both stages hold, and a block of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.body = Stack()
        self.last = nn.Linear(3, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.first.weight
        self.requires_grad_(False)
        for part in (self.first, self.body.blocks[0]):
            part.requires_grad_(True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.last(self.body(self.first(x))))


def test_a_parameter_of_two_stages_is_written_on_both():
    """Bug: a number of one stage was not told, and the other stage left its copy as it was."""
    for difference, _, _ in run_ranks(train_with, 2, Rated, {}, Tied):
        assert difference < 1e-10


class SamByRadius(Sam):
    """Its methods take arguments."""

    @torch.no_grad()
    def climb(self, radius: float) -> None:
        norm = torch.stack([p.grad.norm() for p in with_gradients(self)]).norm()
        for p in with_gradients(self):
            self.state[p]["way"] = p.grad * radius / norm
            p.add_(self.state[p]["way"])

    @torch.no_grad()
    def descend(self) -> None:
        for p in with_gradients(self):
            p.sub_(self.state[p]["way"])
        self.base.step()


def climbing(bad_step: int | None = None) -> float:
    """Makes 3 updates, of 2 steps each; returns the largest difference from a plain loop.

    Args:
        bad_step: has losses that are not finite.
    """
    sw, plain, model = start(Stack, {"on_nonfinite": "skip"})
    mine = sw.DistributedOptimizer(SamByRadius(model.parameters()))
    theirs = SamByRadius(plain.parameters())
    train = trainer(sw)

    def compute(optimizer: Any, step: int) -> None:
        batch = batches(step, 1)[0] * (math.inf if step == bad_step else 1.0)
        optimizer.zero_grad()
        if optimizer is mine:
            train(model, batch)
            return
        for part in batch.tensor_split(4):
            (plain(part).square().mean() / 4).backward()

    for number, optimizer in itertools.product(range(3), (mine, theirs)):
        compute(optimizer, 2 * number)
        optimizer.climb(0.1)
        compute(optimizer, 2 * number + 1)
        optimizer.descend()
    state = model.state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


def test_methods_with_arguments():
    for difference in run_ranks(climbing, 2):
        assert difference < 1e-10


def restarting() -> float:
    """Clears the states after 2 of 4 updates; returns the largest difference from a plain loop."""
    sw, plain, model = start(Stack, {})
    mine, theirs = sw.DistributedOptimizer(Counts(model.parameters())), Counts(plain.parameters())
    train = trainer(sw)
    for number in range(4):
        batch = batches(number, 1)[0]
        for optimizer in (mine, theirs):
            optimizer.zero_grad()
            if number == 2:
                optimizer.state.clear()
        train(model, batch)
        for part in batch.tensor_split(4):
            (plain(part).square().mean() / 4).backward()
        for optimizer in (mine, theirs):
            optimizer.step()
    state = model.state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


def test_states_that_are_cleared():
    """Bug: other ranks went on with what they knew of the states from before."""
    for difference in run_ranks(restarting, 2):
        assert difference < 1e-10


class Draws(Rated):
    def rate(self, gradients: list[Tensor]) -> Any:
        return super().rate(gradients) * torch.rand(())


class CallsStep(Rated):
    calls: Any = None

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if self.calls:
            self.calls[0]()


def with_a_change(change: str) -> None:
    sw, _, model = start(Stack, {})
    own = CallsStep(model.parameters())
    optimizer, train = sw.DistributedOptimizer(own), trainer(sw)
    train(model, batches(0, 1)[0])
    if change == "group" and sw.rank() == 1:
        own.param_groups[0]["params"].pop()
    elif change == "calls":
        batch = batches(0, 1)[0]
        own.calls = [lambda: train(model, batch)]
    optimizer.step()


def test_random_numbers_of_no_parameter_are_refused():
    with pytest.raises(RanksFailedError, match=r"Draws draws random numbers in aten\.rand"):
        run_ranks(train_with, 2, Draws, {})


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("group", "the list of parameters in a group of CallsStep was changed on rank 1"),
        ("calls", "a step function is called inside of an optimizer that updates"),
    ],
)
def test_what_a_script_must_leave(change, text):
    with pytest.raises(RanksFailedError, match=text):
        run_ranks(with_a_change, 2, change)


@pytest.mark.parametrize(("bad_step", "method"), [in_sweep(2, "climb"), (3, "descend")])
def test_a_part_of_an_update_is_not_left_out(bad_step, method):
    """Bug: the weights were NaN, although updates with such gradients are to be left out."""
    with pytest.raises(
        RanksFailedError, match=rf"NonFiniteError: the gradients .* {method}\(\) of SamByRadius"
    ):
        run_ranks(climbing, 2, bad_step)

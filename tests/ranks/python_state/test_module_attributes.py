"""Python attributes of modules: what a forward writes there is its own microbatch's."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH, Block, Stack

from choices import thorough
from shardwright.testing import RanksFailedError, run_ranks

ITERATIONS = (Iteration(), Iteration(train=False), Iteration(batch_size=7))


def check(build: Any, kind: str, **settings: Any) -> None:
    recipe = Recipe(build=build, batch=features, loss=classify)
    config = {"microbatches": 4, "profile": "estimated", "pipeline": kind, **settings}
    assert run_ranks(differences, 2, recipe, Case(config=config, iterations=ITERATIONS)) == [[], []]


class Expert(Block):
    """Leaves the loss of its router in an attribute, as many mixtures of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 3)
        self.aux_loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        self.aux_loss = scores.mean((0, 1)).square().sum()
        return super().forward(x) * scores[..., :1]


class Routes(Expert):
    """Each row takes its own way, which is not known without data; nothing inside reads the attribute."""

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1)
        out, chosen = torch.zeros_like(x), scores[..., 0] > 1 / 3
        if chosen.any():
            out[chosen] = Block.forward(self, x[chosen][None])[0]
        self.aux_loss = scores.mean((0, 1)).square().sum()
        return x + out


class SumsAttributes(Stack):
    """Reads what its blocks left, at the end."""

    def __init__(self, block: type[nn.Module] = Expert) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(block() for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        return logits * (1 + sum(block.aux_loss for block in self.blocks))


class KeepsWhatItSaw(Stack):
    """Attributes of the module itself, a list among them, written on one stage and read on a later one."""

    def forward(self, x: Tensor) -> Tensor:
        self.seen, self.middle = [], None
        for number, block in enumerate(self.blocks):
            x = block(x)
            self.seen.append(x.mean())
            if number == 2:
                self.middle = x
        self.last = x
        return self.head(x + self.middle) * (1 + sum(self.seen))


class Remembers(Stack):
    """A tensor goes from one microbatch to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.before = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.before
        for block in self.blocks:
            x = block(x)
        self.before = x.detach().mean((0, 1))
        return self.head(x)


class ScalesByTheFirst(Stack):
    """What is kept depends on the first microbatch."""

    def __init__(self, measure: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.scale: Tensor | None = None
        self._measure = measure

    def forward(self, x: Tensor) -> Tensor:
        y = self.blocks[0](x)
        if self.scale is None:
            self.scale = self._measure(x, y)
        for block in self.blocks[1:]:
            y = block(y * self.scale)
        return self.head(y)


@pytest.mark.parametrize(
    "build",
    [
        partial(ScalesByTheFirst, lambda _, y: 1 / y.detach().std()),
        partial(ScalesByTheFirst, lambda x, _: 1 + torch.rand(1, dtype=x.dtype)),
    ],
    ids=["of a unit", "random"],
)
def test_what_only_the_first_microbatch_computes_is_refused(build):
    message = "takes another path than when it was traced|goes from one microbatch to the next"
    with pytest.raises(RanksFailedError, match=message):
        check(build, "1f1b")


class _Scales(torch.autograd.Function):
    """Its backward looks at an attribute of a module."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        ctx.module = module
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.module.backwards += 1
        return gradients[0] * ctx.module.factor, None


class LooksBack(Block):
    """Leaves something for its backward, as reversible layers do with the state of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.ones(())
        self.backwards = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.factor = 1 + y.detach().mean()
        return _Scales.apply(y, self)


class LooksBackOften(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(LooksBack() for _ in range(8))


def test_a_backward_finds_what_its_own_forward_left():
    check(LooksBackOften, "interleaved_1f1b", activation_checkpointing="none")


class Adapted(nn.Module):
    """Has an adapter that can be switched off, and drops some of what it computes; it runs as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.uses_adapter = True
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.adapter = nn.Parameter(torch.randn(WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.adapter * self.uses_adapter
        return x + nn.functional.dropout((x @ weight).tanh(), 0.3, self.training)


class _Twice(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(Adapted() for _ in range(8))

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SwitchesAdaptersOff(_Twice):
    """Compares itself with what it was before it had adapters."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.run(x)
        for block in self.blocks:
            block.uses_adapter = False
        reference = self.run(x)
        for block in self.blocks:
            block.uses_adapter = True
        return y - reference.tanh()


class HasASecondHalf(Stack):
    """A flag and a number of its own, of which code between the blocks reads."""

    def __init__(self) -> None:
        super().__init__()
        self.second, self.scale = False, 1.0

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            self.second = number > 2
            x = block(x) * (2 if self.second else self.scale)
            self.scale = 3.0
        self.second, self.scale = False, 1.0
        return self.head(x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "first"),
    [
        (SwitchesAdaptersOff, "zb_v"),
        (HasASecondHalf, "1f1b"),
    ],
)
def test_what_a_forward_puts_back_at_its_end_is_its_own_until_then(build, first):
    check(build, first)


@pytest.mark.parametrize(
    ("block", "first"),
    [(Expert, "interleaved_1f1b"), thorough(Routes, "1f1b")],
)
def test_what_a_unit_leaves_in_an_attribute_is_found_on_every_stage(block, first):
    check(lambda: SumsAttributes(block), first)


def test_every_microbatch_finds_what_it_wrote():
    check(KeepsWhatItSaw, "zb_v")


def test_what_the_next_microbatch_would_have_to_wait_for_is_refused():
    with pytest.raises(RanksFailedError) as caught:
        check(Remembers, "interleaved_1f1b")
    assert "the attribute before of the model (Remembers) is read at " in str(caught.value)
    assert "test_module_attributes.py:" in str(caught.value)

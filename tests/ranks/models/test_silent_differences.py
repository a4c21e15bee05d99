"""Ordinary code of scripts and models that once trained something else than in one process, silently."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from stacks import QUIET, Stack, apart, batches, start
from stacks import train as squares
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH, Block
from zoo_modules import Stack as Blocks

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

CONFIG = {"microbatches": 4, "profile": "estimated"}
V = {**CONFIG, "pipeline": "zb_v"}


class SkipsItself(Block):
    """Stochastic depth, as it is mostly written."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.rand(()) < 0.5:
            return x
        return super().forward(x)


def stack_of(block: type[Block], *, num_blocks: int = 6) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = Blocks(num_blocks)
        model.blocks = nn.ModuleList(block() for _ in range(num_blocks))
        return model

    return build


def test_blocks_that_skip_themselves_at_the_end_of_a_stage():
    """The next stage was given the argument of a block that gave it back in the trace, always."""
    recipe = Recipe(build=stack_of(SkipsItself), batch=features, loss=classify)
    case = Case(config=CONFIG, iterations=[Iteration()] * 4)
    assert run_ranks(differences, 2, recipe, case) == [[], []]


class DropsLayers(Blocks):
    """Layer dropping in the code between the blocks."""

    def __init__(self, share: float) -> None:
        super().__init__(6)
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() >= self.share:
                x = block(x)
        return self.head(x)


@pytest.mark.parametrize(
    ("share", "message"),
    [(0.3, "takes another path than when it was traced"), (1.0, "need at least 2 stages")],
)
def test_layers_that_are_dropped_between_modules_are_one_error_on_all_ranks(share, message):
    """Each rank traced what its own random numbers chose: "different models", or one had no units left."""

    def job() -> None:
        model = start(lambda: DropsLayers(share), CONFIG)[2]
        random.seed(1 + dist.get_rank())
        train = sw.step(squares)
        for _ in range(4):
            train(model, torch.randn(8, 5, WIDTH, dtype=torch.float64))

    for outcome in run_ranks_outcomes(job, 2):
        assert message in outcome.error
        assert "draws random numbers of Python or NumPy between modules" in outcome.error
        assert "by torch.rand(())" in outcome.error


class ClampsLargeRows(Block):
    """Changes what it is given, or leaves it."""

    def forward(self, x: Tensor) -> Tensor:
        if x.detach().abs().amax() > 100:
            x.clamp_(-1, 1)
        return super().forward(x)


class ReadsWhatMayBeClamped(Blocks):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.clamps, self.scale = ClampsLargeRows(), scale

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.blocks
        y = first(x)
        x = y * self.scale
        for block in others:
            y = block(y)
        return self.head(y + self.clamps(x) + x)


class TakesItTwice(nn.Module):
    """Changes one of two arguments, or looks whether they are one."""

    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.linear, self.changes = nn.Linear(8, 8), changes

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        if self.changes:
            x.mul_(2)
        return torch.tanh(self.linear(x)) + skipped * (1 if x is skipped else 3)


class GivesItTwice(nn.Module):
    def __init__(self, changes: bool) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.blocks = nn.ModuleList(TakesItTwice(changes) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x, x)
        return self.head(x)


class GivesItBackTwice(nn.Linear):
    """With its argument, which lies at two places."""

    def forward(self, x: Tensor, kept: Any = None) -> Any:
        made = torch.tanh(super().forward(x))
        return made, (made, x)


class KeepsResults(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GivesItBackTwice(8, 8) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        kept: Any = None
        for block in self.blocks:
            x, kept = block(x, kept)
        return x + kept[1] * kept[0]


def train_with_one_tensor_twice(make: Callable[[], nn.Module]) -> list[str]:
    sw, plain, model = start(make, {"pipeline": "zb_v"})
    train = sw.step(squares)
    found = []
    for number in range(3):
        (x,) = batches(number, 1)
        train(model, x)
        for part in x.tensor_split(4):
            (plain(part).square().mean() / 4).backward()
        found += apart(plain, model)
    return found


@pytest.mark.parametrize(
    "make", [lambda: GivesItTwice(changes=True), lambda: GivesItTwice(changes=False), KeepsResults]
)
def test_a_tensor_that_is_given_twice_is_one_on_another_stage(make):
    """It came as two: a change in place of one left the other as it was, and others gave back "a new one"."""
    assert run_ranks(train_with_one_tensor_twice, 2, make) == [[], []]


def test_a_change_in_place_that_the_trace_does_not_have():
    """Autograd said something of leaves; without gradients, a stage went on with the tensor as it was."""

    def job(scale: float) -> list[str]:
        recipe = Recipe(build=lambda: ReadsWhatMayBeClamped(scale), batch=features, loss=classify)
        return differences(recipe, Case(config=CONFIG))

    assert run_ranks(job, 2, 1.0) == [[], []]
    message = r"ClampsLargeRows changes an argument in place in microbatch \d, but not in the trace"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(job, 2, 1e4)


class BuffersUnderOtherNames(Blocks):
    """A codebook that is written through `data`, and a queue through a view."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codebook", torch.ones(WIDTH))
        self.register_buffer("queue", torch.zeros(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.training and number == 1:
                self.codebook.data.copy_(0.5 * self.codebook + 0.5 * x.detach().mean((0, 1)))
        x = x + self.queue.clone().mean(0)
        if self.training:
            self.queue[1:3].copy_(x.detach()[0, :2])
        return self.head(x)


class MomentumEncoder(nn.Module):
    """Follows another encoder by `k.data = ...`, at the beginning of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Blocks(3), Blocks(2)
        self.key.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for q, k in zip(self.query.blocks[:2].parameters(), self.key.blocks.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * 0.1
        y = self.query(x)
        with torch.no_grad():
            target = self.key(x)
        return y + target


class HeadWithPrototype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, CLASSES)
        self.register_buffer("prototype", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x - self.prototype)


class WritesIntoItsHead(Blocks):
    """Code between modules changes a buffer of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = HeadWithPrototype()

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.training and number == 2:
                self.head.prototype.copy_(x.detach().mean((0, 1)))
        return self.head(x)


@pytest.mark.parametrize(
    ("build", "config"),
    [
        (WritesIntoItsHead, CONFIG),
        (BuffersUnderOtherNames, V),
        (MomentumEncoder, CONFIG),  # what is between the change and its last user is one stage
    ],
)
def test_what_is_written_under_another_name(build, config):
    """Only the rank that wrote had it, and `state_dict` had what another rank has."""
    recipe = Recipe(build=build, batch=features, loss=classify)
    case = Case(config=config, iterations=[Iteration(), EVALUATION, Iteration()])
    assert run_ranks(differences, 2, recipe, case) == [[], []]


class ThawsLater(Stack):
    num_updates = 0

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.num_updates >= 5):
            for block in self.blocks:
                x = block(x)
        return self.head(x)


def train_until_it_thaws() -> None:
    sw, _, model = start(ThawsLater, {})
    train = sw.step(squares)
    for number in range(8):
        model.module.num_updates = number
        train(model, batches(number, 1)[0])


def test_a_gradient_mode_that_changes_later_is_noticed():
    """The first stage was never trained: nobody sent it gradients."""
    with pytest.raises(RanksFailedError, match=r"requires gradients in microbatch 0, but none in the trace"):
        run_ranks(train_until_it_thaws, 2)


class Probe(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 3)
        self.always = True

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.detach() if self.always or x.shape[1] > 4 else x)


class ProbedBackbone(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = Probe()


class CountingProbe(Probe):
    """Changes what it is given to count in."""

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        return super().forward(x) / counts.mean()


class CountedBackbone(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.head = CountingProbe()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x, torch.zeros_like(x))


def train_a_probe(
    optimizer_kind: Callable[..., torch.optim.Optimizer],
    config: dict[str, Any],
    make: Callable[[], nn.Module] = ProbedBackbone,
) -> list[str]:
    sw, plain, model = start(make, config)
    plain_optimizer = optimizer_kind(plain.parameters(), lr=0.1, weight_decay=0.5)
    optimizer = sw.DistributedOptimizer(optimizer_kind(model.parameters(), lr=0.1, weight_decay=0.5))
    train = sw.step(squares)
    found = []
    for number in range(2):
        (x,) = batches(number, 1)
        train(model, x)
        for part in x.tensor_split(4):
            (plain(part).square().mean() / 4).backward()
        found += apart(plain, model)
        plain_optimizer.step()
        optimizer.step()
        expected = dict(plain.named_parameters())
        found += [n for n, p in model.local_named_parameters() if not torch.allclose(p, expected[n])]
    return found


def test_what_a_unit_detaches_has_no_gradient():
    """It had zeros, so that AdamW made the weights behind it smaller."""
    assert run_ranks(train_a_probe, 2, torch.optim.AdamW, {"pipeline": "zb_v"}) == [[], []]


def test_what_a_unit_detaches_that_changes_another_argument():
    assert run_ranks(train_a_probe, 2, torch.optim.AdamW, {}, CountedBackbone) == [[], []]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.last(x)


def train_with_hook(name: str, config: dict[str, Any]) -> list[str]:
    sw, plain, model = start(Tied, config)
    for module in (plain, model.module):
        module.get_parameter(name).register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
    train = sw.step(squares)
    (x,) = batches(0, 1)
    train(model, x)
    for part in x.tensor_split(4):
        (plain(part).square().mean() / 4).backward()
    train(model, x)
    for part in x.tensor_split(4):
        (plain(part).square().mean() / 4).backward()
    return apart(plain, model)


def test_a_hook_for_the_gradient_of_a_parameter_that_stages_share():
    """Each stage gave the hook its own part of the gradient."""
    message = r"first\.weight has a hook for its gradient, and is used by several stages"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(train_with_hook, 2, "first.weight", {"pipeline": "zb_v"})
    assert run_ranks(train_with_hook, 2, "blocks.1.weight", {"pipeline": "zb_v"}) == [[], []]


def train_with_scaler(fused: bool) -> tuple[list[bool], list[float]]:
    sw.init({**QUIET, "microbatches": 2})
    torch.manual_seed(0)
    module = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    model = sw.DistributedModel(module)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(module.parameters(), lr=0.1, fused=fused))
    scaler = sw.GradScaler("cpu", init_scale=1024.0)

    @sw.step
    def train(model: Any, x: Tensor) -> None:
        model.backward(scaler.scale(model(x).square().mean()))

    moved, sums = [], []
    for step in range(3):
        x = torch.linspace(-1, 1, 64).view(4, 16) * (1e30 if step == 1 else 1.0)
        optimizer.zero_grad()
        train(model, x)
        before = [p.detach().clone() for p in model.local_parameters()]
        scaler.step(optimizer)
        scaler.update()
        after = list(model.local_parameters())
        moved.append(any(not torch.equal(a, b) for a, b in zip(before, after, strict=True)))
        sums.append(sum(p.double().sum().item() for p in after))
    return moved, sums


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_fused_optimizer_under_a_scaler(num_ranks):
    """It stepped with the gradients as they were scaled, infinities too."""
    plain, fused = (run_ranks(train_with_scaler, num_ranks, fused) for fused in (False, True))
    for (moved, sums), (moved_plain, sums_plain) in zip(fused, plain, strict=True):
        assert moved == moved_plain == [True, False, True]
        assert sums == pytest.approx(sums_plain, rel=1e-5)


def train_with_weights_of_losses(registered: bool, *, num_steps: int = 2) -> None:
    sw.init({**QUIET, "microbatches": 2})
    weights = nn.Parameter(torch.zeros(2))
    module = Stack()
    if registered:
        module.weights = weights
    model = sw.DistributedModel(module)
    parameters = {id(p): p for p in [*module.parameters(), weights]}
    weights_of = (lambda model: model.module.weights) if registered else (lambda model: weights)
    sw.DistributedOptimizer(torch.optim.SGD(parameters.values(), lr=0.1))

    @sw.step
    def train(model: Any, x: Tensor) -> None:
        w = weights_of(model)
        model.backward((-w[0]).exp() * model(x).square().mean() + w[0])

    for _ in range(num_steps):
        train(model, torch.ones(4, 5, 8))


def test_an_optimizer_with_more_than_the_model():
    """The weights of the losses were dropped from it, and never trained."""
    message = r"1 of the 19 parameters of the optimizer are not the wrapped model's \(one has shape \(2,\)\)"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(train_with_weights_of_losses, 2, False)
    run_ranks(train_with_weights_of_losses, 1, False)
    run_ranks(train_with_weights_of_losses, 2, True)


def mix_with_given_number() -> list[str]:
    sw, plain, model = start(Stack, {})
    number = np.float64(0.25 + dist.get_rank())
    weights = np.arange(3) + dist.get_rank()

    @sw.step
    def train(model: Any, x: Tensor, number: Any, weights: Any) -> None:
        model.backward((model(number * x) * torch.from_numpy(weights)).square().mean() * number)

    (x,) = batches(0, 1)
    train(model, x, number, weights)
    first = np.float64(0.25)
    for part in x.tensor_split(4):
        ((plain(first * part) * torch.arange(3)).square().mean() * first / 4).backward()
    return apart(plain, model)


def test_numbers_and_arrays_of_numpy_are_those_of_the_first_rank():
    """Each rank had its own: the first mixed the samples with one, the last one weighed the losses."""
    assert run_ranks(mix_with_given_number, 2) == [[], []]


class DrawsTwice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = x * random.random()
        return super().forward(x) * random.random()


class DrawsInsideToo(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks.append(DrawsInside())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * random.random())


class DrawsInside(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + np.random.rand())


def train_once(make: Callable[[], nn.Module], config: dict[str, Any]) -> None:
    sw, _, model = start(make, config)
    train = sw.step(squares)
    before = random.getstate()
    for number in range(2):
        train(model, batches(number, 1)[0])
    assert (random.getstate() == before) == (make is not DrawsTwice and make is not DrawsInsideToo)


def test_numbers_of_python_that_ranks_would_draw_in_another_order():
    said = "numbers of Python or NumPy between modules, and at several places"
    with pytest.raises(RanksFailedError, match=said):
        run_ranks(train_once, 2, DrawsTwice, {"pipeline": "zb_v"})


def test_tracing_draws_nothing_from_python():
    run_ranks(train_once, 2, Stack, {})


def evaluate_with_hooks() -> list[float]:
    sw, plain, model = start(Stack, {})
    (x,) = batches(0, 1)
    patch = torch.ones(5, 8, dtype=torch.float64)

    @sw.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)

    def differs() -> float:
        with torch.no_grad():
            return (evaluate(model, x).concat() - plain(x)).abs().max().item()

    found = [differs()]
    for number in range(4):
        hooks = [
            module.blocks[number].register_forward_hook(lambda module, args, output: output * 0 + patch)
            for module in (plain, model.module)
        ]
        found.append(differs())
        for hook in hooks:
            hook.remove()
        found.append(differs())
    return found


def test_hooks_come_and_go_between_steps():
    """At the end of a stage the next one went on without the hook; elsewhere the step failed."""
    for found in run_ranks(evaluate_with_hooks, 2):
        assert max(found) < 1e-10


class FrozenForAWhile(Blocks):
    """A loss that must not train the head, and one that must, as when a GAN is trained in one step."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        trained = self.head(x)
        self.head.requires_grad_(False)
        frozen = self.head(2.0 * x)
        self.head.requires_grad_(True)
        return trained + frozen


def test_parameters_that_are_frozen_for_a_part_of_the_step():
    """The gradients of weights that were put off went by what was trained at the end of the forward."""
    recipe = Recipe(build=FrozenForAWhile, batch=features, loss=classify)
    case = Case(config={**CONFIG, "pipeline": "zb_h1"}, iterations=[Iteration()] * 2)
    assert run_ranks(differences, 2, recipe, case) == [[], []]


class Chosen:
    """What a script sets between steps."""

    number = 0


def train_choosing(wide: bool, number: int) -> list[str]:
    sw, plain, model = start(Stack, {"pipeline_parallel_degree": 2})
    found = []

    def chosen(model: nn.Module, x: Tensor) -> Tensor:
        made = []
        own = model.module if isinstance(model, sw.DistributedModel) else model
        for block in own.blocks:
            x = block(x)
            made.append(x)
        taken = torch.stack([made[Chosen.number], x]).sum(0) if wide else x + made[Chosen.number]
        return own.head(taken).square().mean()

    @sw.step
    def train(model: nn.Module, x: Tensor) -> Tensor:
        loss = chosen(model, x)
        model.backward(loss)
        return loss

    for step, Chosen.number in enumerate([0, number]):
        x = batches(step, 1)[0]
        loss = train(model, x).reduce_mean().item()
        expected = sum(chosen(plain, part).item() for part in x.tensor_split(4)) / 4
        if abs(loss - expected) > 1e-12:
            found.append(f"step {step}: {loss}, not {expected}")
    return found


def test_another_tensor_than_in_the_trace_is_refused():
    """The one of the trace was taken in its place, whatever the code said."""
    assert run_ranks(train_choosing, 2, True, 0) == [[], []]
    with pytest.raises(RanksFailedError, match=r"gets another tensor in microbatch 0 than in the trace"):
        run_ranks(train_choosing, 2, True, 2)


def return_another(backward: bool) -> None:
    sw, _, model = start(Stack, {"pipeline_parallel_degree": 2})

    @sw.step
    def train(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.module.blocks[0](x)
        losses = [hidden.square().mean(), model(x).square().mean()]
        model.backward(losses[Chosen.number] if backward else losses[1])
        return losses[1] if backward else losses[Chosen.number]

    for Chosen.number in (1, 0):
        train(model, batches(0, 1)[0])


@pytest.mark.parametrize(("backward", "what"), [(True, "the loss"), (False, "the result")])
def test_another_loss_or_result_than_in_the_trace_is_refused(backward, what):
    with pytest.raises(RanksFailedError, match=f"{what} is another tensor in microbatch 0"):
        run_ranks(return_another, 2, backward)

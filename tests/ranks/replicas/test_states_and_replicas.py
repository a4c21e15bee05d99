"""States that are saved, replicas that must agree, runs that follow one another: each once went wrong."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stacks import QUIET, Stack, apart, batches, start
from stacks import train as squares
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH
from zoo_modules import Stack as Blocks

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks


def wrap_again() -> None:
    sw, _, model = start(Stack, {})
    sw.step(squares)(model, batches(0, 1)[0])
    sw.shutdown()
    sw.init({**QUIET, "pipeline_parallel_degree": 1})
    sw.DistributedModel(model.module)


def test_a_model_that_an_earlier_run_has_spread():
    """What the other rank had trained got new first values."""
    with pytest.raises(
        RanksFailedError, match=r"an earlier run has spread this model over ranks, and \d+ of"
    ):
        run_ranks(wrap_again, 2)


def states_of_two_moments() -> list[bool]:
    sw, _, model = start(Stack, {})
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.5))
    train = sw.step(squares)
    train(model, batches(0, 1)[0])
    before = model.state_dict()
    copied = copy.deepcopy(before)
    outer = nn.Module()
    outer.model = model
    nested = outer.state_dict()
    optimizer.step()
    after = model.state_dict()
    return [
        all(torch.equal(before[name], copied[name]) for name in copied),
        not any(torch.equal(before[name], after[name]) for name in after),
        list(nested) == [f"model.{name}" for name in before],
        all(torch.equal(nested[f"model.{name}"], copied[name]) for name in copied),
        list(model.state_dict(prefix="net.")) == [f"net.{name}" for name in before],
    ]


def test_a_state_is_of_one_moment_and_complete_under_every_prefix():
    """The rank that saved it had its own stage of now, and the others' of then; or tensors without data."""
    assert run_ranks(states_of_two_moments, 2) == [[True] * 5] * 2


def load_state_of_optimizer(of_first: bool) -> list[str]:
    """Goes back to what a plain and a wrapped model were after the first step; names of what then differs."""
    sw, plain, model = start(lambda: nn.Sequential(*(nn.Linear(8, 8) for _ in range(8))), {})
    train, (x,) = sw.step(squares), batches(0, 1)
    pairs: list[tuple[Any, Any]] = [(plain, torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9))]
    own = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    pairs.append((model, sw.DistributedOptimizer(own)))

    def update() -> None:
        for owner, optimizer in pairs:
            optimizer.zero_grad()
            if owner is model:
                train(model, x)
            else:
                for part in x.tensor_split(4):
                    (plain(part).square().mean() / 4).backward()
            optimizer.step()

    update()
    saved = [copy.deepcopy([owner.state_dict(), optimizer.state_dict()]) for owner, optimizer in pairs]
    if of_first:
        dist.broadcast_object_list(saved, src=0)  # as from a file of rank 0
    update()
    for (owner, optimizer), (state, state_of_optimizer) in zip(pairs, saved, strict=True):
        owner.load_state_dict(state)
        optimizer.load_state_dict(state_of_optimizer)
    update()
    found = model.state_dict()
    return [name for name, value in plain.state_dict().items() if not torch.allclose(found[name], value)]


def test_each_rank_goes_back_to_the_state_of_its_optimizer():
    assert run_ranks(load_state_of_optimizer, 2, of_first=False) == [[], []]


class Codebook(Blocks):
    """Reads what it has learned from data, between blocks and inside one."""

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("centre", torch.zeros(WIDTH))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        x = self.norm((x - self.centre).transpose(1, 2)).transpose(1, 2)
        if self.training:
            self.centre.mul_(0.5).add_(x.detach().mean((0, 1)), alpha=0.5)
        return self.head(x)


def test_replicas_go_on_with_the_buffers_of_the_first():
    """Each had its own, which drifted apart while the parameters that read them were averaged."""
    config = {"microbatches": 4, "profile": "estimated", "pipeline_parallel_degree": 1}
    recipe = Recipe(build=Codebook, batch=features, loss=classify)
    case = Case(config=config, iterations=[Iteration(), Iteration(), EVALUATION, Iteration(), EVALUATION])
    assert run_ranks(differences, 2, recipe, case) == [[]] * 2


class Counting(Stack):
    """Counts what it has seen, as routers do that balance their experts without a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("bias", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.count.add_(x.detach().square().sum())
        return super().forward(x) + self.bias


def balance(config: dict[str, Any]) -> list[float]:
    sw, plain, model = start(Counting, config)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    def sum_over_replicas(*_: Any) -> None:
        count = model.module.count
        if not count.is_meta:
            dist.all_reduce(count, group=sw.get_dp_process_group())
            model.module.bias.add_(count, alpha=0.01)
            count.zero_()

    optimizer.optimizer.register_step_pre_hook(sum_over_replicas)
    train, found = sw.step(squares), []
    for number in range(3):
        xs = batches(number, sw.dp_size())
        train(model, xs[sw.dp_rank()])
        optimizer.step()
        plain.bias.add_(xs.square().sum(), alpha=0.01)
        found.append(float(model.state_dict()["bias"] - plain.bias))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("config", [{"pipeline_parallel_degree": 2}, {"sharded_data_parallel_degree": 2}, {}])
def test_a_hook_before_the_update_sees_what_its_own_replica_has_counted(config):
    """It saw the counts of the first replica twice: those of the second were gone when its step ended."""
    stages = {"pipeline_parallel_degree": 1, **config}
    for found in run_ranks(balance, 2 * stages["pipeline_parallel_degree"], stages):
        assert found == pytest.approx([0.0] * 3, abs=1e-9)


def train_with_another_head(when: str, stages: int) -> list[str]:
    config = {"pipeline_parallel_degree": stages}
    sw, plain, model = start(Stack, config)
    train = sw.step(squares)
    for number in range(2):
        if (number, when) in ((0, "before"), (1, "after")):
            torch.manual_seed(sw.rank())
            model.module.head = nn.Linear(8, 3).double()
            torch.manual_seed(0)
            plain.head = nn.Linear(8, 3).double()
        for module in (plain, model):
            module.zero_grad()
        xs = batches(number, sw.dp_size())
        train(model, xs[sw.dp_rank()])
        for batch in xs:
            for part in batch.tensor_split(4):
                (plain(part).square().mean() / 4 / len(xs)).backward()
        if found := apart(plain, model):
            return [f"step {number}", *found]
    return []


@pytest.mark.thorough
def test_a_head_that_comes_after_the_wrapping_is_averaged_over_replicas():
    """Each replica trained a head of its own."""
    for when in ("before", "after"):
        assert run_ranks(train_with_another_head, 2, when, 1) == [[], []]
    message = "parameters were added to the model, or replaced, after it was spread over stages and replicas"
    with pytest.raises(RanksFailedError, match=message):
        run_ranks(train_with_another_head, 4, "after", 2)


def train_and_save(saved: list[Any], device: str) -> list[Any]:
    """Two steps from what was saved, or four from the beginning; what is there after two and in the end."""
    sw.init(QUIET)
    torch.manual_seed(0)
    whole = nn.Sequential(*(nn.Linear(8, 8) for _ in range(8)))
    model = sw.DistributedModel(whole.to(device) if saved else whole)
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train, found = sw.step(squares), []
    if saved:
        for owner, state in zip((model, optimizer, schedule), saved[sw.rank()], strict=True):
            owner.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.1 * 0.5**2
        optimizer.param_groups[0]["weight_decay"] = 0.25  # set by a script that goes on otherwise
    for number in range(2 if saved else 0, 4):
        if not saved and number == 2:
            optimizer.param_groups[0]["weight_decay"] = 0.25
        optimizer.zero_grad()
        train(model, batches(number, 1, torch.float32)[0])
        optimizer.step()
        schedule.step()
        assert optimizer.param_groups[0]["weight_decay"] == (0.25 if number > 1 else 0.01)
        found.append(copy.deepcopy([owner.state_dict() for owner in (model, optimizer, schedule)]))
    return found


def test_states_are_loaded_before_the_first_step():
    """On the meta device the moments were lost; elsewhere a rank's own did not fit the whole model's."""
    whole = run_ranks(train_and_save, 2, [], "cpu")
    again = run_ranks(train_and_save, 2, [states[1] for states in whole], "cpu")
    for expected, found in zip(whole, again, strict=True):
        names = [states[-1][1].pop("parameter_names") for states in (expected, found)]
        assert names[0] == names[1]
        torch.testing.assert_close(found[-1], expected[-1], rtol=0, atol=0)


def step_in_the_backward(config: dict[str, Any]) -> None:
    sw, _, model = start(Stack, config)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    sw.step(squares)(model, batches(0, 1)[0])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_an_optimizer_that_steps_in_the_backward(num_ranks):
    """With one stage it stepped once for each microbatch."""
    with pytest.raises(RanksFailedError, match=r"optimizer\.step\(\) is called inside a step function"):
        run_ranks(step_in_the_backward, num_ranks, {})


class ComplexBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, dtype=torch.complex128)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(torch.complex(x, 0.1 * x)).real

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        return self  # `model.double()` would make real numbers of complex ones


def train_complex_layers(config: dict[str, Any]) -> list[str]:
    sw, plain, model = start(lambda: nn.Sequential(*(ComplexBlock() for _ in range(8))), config)
    (x,) = batches(0, 1)
    sw.step(squares)(model, x)
    for part in x.tensor_split(4):
        (plain(part).square().mean() / 4).backward()
    return apart(plain, model)


def test_complex_layers_under_zero_bubble():
    """Their gradients were not conjugated."""
    assert run_ranks(train_complex_layers, 2, {"pipeline": "zb_h1"}) == [[], []]


class AsksWhereItIs(Stack):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        first = next(self.parameters())
        offset = torch.zeros((), dtype=x.dtype, device=first.device)
        return y + offset + float(first.is_meta) + float(not first.is_cpu)


def train_where_it_is() -> list[str]:
    sw, plain, model = start(AsksWhereItIs, {})
    (x,) = batches(0, 1)
    sw.step(squares)(model, x)
    for part in x.tensor_split(4):
        (plain(part).square().mean() / 4).backward()
    return apart(plain, model)


def test_code_between_layers_asks_where_a_parameter_is():
    """On the last rank the first parameter was on no device, and so was the loss."""
    assert run_ranks(train_where_it_is, 2) == [[], []]


class Counts(torch.optim.SGD):
    """Keeps a number beside what it keeps for each parameter."""

    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step(closure)


def load_what_was_given(foreign: bool) -> tuple[Any, Any]:
    sw, _, model = start(Stack, {})
    factor = nn.Parameter(torch.ones((), dtype=torch.float64))
    parameters = [*model.parameters(), *([factor] if foreign else [])]
    optimizer = sw.DistributedOptimizer(Counts(parameters, lr=0.1, momentum=0.9))

    @sw.step
    def train(model: Any, x: Tensor) -> None:
        model.backward((model(x) * factor).square().mean())

    train(model, batches(0, 1)[0])
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.step()
    optimizer.load_state_dict(saved)
    moments = len([key for key in optimizer.state_dict()["state"] if type(key) is int])
    return optimizer.state["steps"], moments == len(parameters)


@pytest.mark.parametrize("foreign", [False, True])
def test_an_optimizer_takes_all_of_the_state_that_it_gave(foreign):
    """What it keeps beside parameters was dropped; with one outside the model it refused its own state."""
    assert run_ranks(load_what_was_given, 1, foreign) == [(1, True)]

"""What a script changes from one step to the next: the task, what is trained, attributes, types.

What changes a model when its plan is made, before the first microbatch runs.

The planner has traced the model. That trace places its units, and serves the first batch too unless hooks, a
state that waits to be loaded, or the values of other ranks have made another model of it.
"""

import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stacks import TOLERANCE, WIDTH, Stack, apart, batches, start
from stacks import train as squares
from torch import Tensor, nn

from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

Prepare = Callable[[nn.Module, int], None]


class Embeds(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.embedding((x * 3).long().clamp(0, 9)))


def frozen_apart(config: dict[str, Any]) -> None:
    """Each replica freezes another block, of as many numbers."""
    sw, _, model = start(Stack, config)
    train = sw.step(squares)
    for number in range(2):
        if number == 1:
            model.module.blocks[sw.dp_rank()].requires_grad_(False)
        train(model, batches(number, 2)[sw.dp_rank()])


@pytest.mark.parametrize(
    ("ranks", "config"),
    [
        (2, {"data_parallel_degree": 2}),
        (2, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
    ],
)
def test_replicas_that_freeze_other_parameters(ranks, config):
    """They added up gradients of different ones: messages were as long on each."""
    outcomes = run_ranks_outcomes(frozen_apart, ranks, config, timeout_s=60)
    assert [outcome.error_type for outcome in outcomes] == ["UsageError"] * ranks
    expected = r"in step 2, blocks\.0\.\S+ is trained on rank \d and frozen on rank 0\. They are replicas"
    assert re.search(expected, str(outcomes[0].exception))


def train_and_compare(
    make: Callable[[], nn.Module],
    config: Mapping[str, Any],
    change: Prepare,
    *,
    num_steps: int = 4,
    always: bool = True,
    update: bool = True,
) -> list[str]:
    """Trains both models, and tells what differs."""
    sw, plain, model = start(make, config)
    pairs = [(plain, plain), (model.module, model)]
    optimizers = [torch.optim.SGD(plain.parameters(), lr=0.05)]
    optimizers.append(sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05)))

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if always or x[0, 0, 0] > 0.5:
            model.backward(loss)
        return loss

    found = []
    for number in range(num_steps):
        for module, owner in pairs:
            change(module, number)
            if update:
                for parameter in owner.parameters():
                    parameter.grad = None
        xs = batches(number, sw.dp_size()).to(next(plain.parameters()).dtype)
        loss = train(model, xs[sw.dp_rank()]).reduce_mean()
        losses = []
        for replica, batch in enumerate(xs):
            for part in batch.tensor_split(4):
                plain_loss = plain(part).square().mean()
                if replica == sw.dp_rank():
                    losses.append(plain_loss.detach())
                if always or part[0, 0, 0] > 0.5:
                    (plain_loss / 4 / len(xs)).backward()
        if (loss - torch.stack(losses).mean()).abs().item() > TOLERANCE:
            found.append(f"step {number}: loss")
        found += [f"step {number}: gradient of {name}" for name in apart(plain, model)]
        norms = [
            sw.clip_grad_norm_(model, 1e9).item(),
            nn.utils.clip_grad_norm_(model.parameters(), 1e9).item(),
            nn.utils.clip_grad_norm_(plain.parameters(), 1e9).item(),
        ]
        if max(norms) - min(norms) > TOLERANCE:
            found.append(f"step {number}: norm {norms}")
        for optimizer in optimizers if update else ():
            optimizer.step()
    state = model.state_dict()
    for name, value in plain.state_dict().items():
        statistics = "running" in name or "tracked" in name  # each replica has its own
        if not (statistics and sw.dp_size() > 1) and not torch.allclose(state[name], value, atol=1e-9):
            found.append(f"state of {name}")
    return found


PIPELINE: dict[str, Any] = {}
REPLICAS = {"pipeline_parallel_degree": 1}
MESHES = [(2, PIPELINE), (2, REPLICAS)]
NAMES = ["pipeline", "replicas"]


def nothing_differs(num_ranks: int, *args: Any, **kwargs: Any) -> None:
    for found in run_ranks(train_and_compare, num_ranks, *args, **kwargs):
        assert found == []


def freeze_and_unfreeze(model: nn.Module, number: int) -> None:
    model.blocks[1].requires_grad_(number > 0)
    model.blocks[2].requires_grad_(number < 2)


@pytest.mark.parametrize(("num_ranks", "config"), MESHES, ids=NAMES)
def test_parameters_are_frozen_and_set_free(num_ranks, config):
    nothing_differs(num_ranks, Stack, config, freeze_and_unfreeze)


def nothing(model: nn.Module, number: int) -> None:
    pass


@pytest.mark.parametrize(("num_ranks", "config"), MESHES, ids=NAMES)
def test_some_microbatches_have_no_backward(num_ranks, config):
    nothing_differs(num_ranks, Stack, config, nothing, num_steps=3, always=False, update=False)


class ChangesTheRowThatAnAttributeNames(Stack):
    """A view made on the first stage and changed on the last."""

    row = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        changed = x * 2
        view = changed[:, self.row]
        for block in self.blocks[1:]:
            x = block(x)
        view += x.mean(1)
        return self.head(changed + x)


class Settings:
    """What a model may keep its options in."""

    row = 0


class UsesSomeBlocks(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.config = Settings()
        self.config.row = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 2 + self.config.row]:
            x = block(x)
        return self.head(x)


def set_row(model: nn.Module, number: int) -> None:
    owner = getattr(model, "config", model)
    owner.row = max(0, number - 1)


@pytest.mark.parametrize(
    "make",
    [ChangesTheRowThatAnAttributeNames, UsesSomeBlocks],
)
def test_the_script_sets_an_attribute_that_decides_what_is_computed(make):
    nothing_differs(2, make, PIPELINE, set_row)


class Scaled(nn.Linear):
    """Returns a number that it also counts with."""

    scale = 1.0

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.scale


class UsesANumber(Stack):
    counts = False

    def __init__(self) -> None:
        super().__init__()
        self.first = Scaled(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, scale = self.first(x)
        if self.counts:
            self.first.scale += 1.0
        return super().forward(x) * scale


def count(model: nn.Module, number: int) -> None:
    model.counts = True


def test_a_number_that_a_unit_returns_must_be_that_of_the_trace():
    with pytest.raises(RanksFailedError, match=r"but 1\.0 in the trace"):
        run_ranks(train_and_compare, 2, UsesANumber, PIPELINE, count)


def test_weights_change_their_type_and_the_batch_does_not():
    def job():
        sw, _, model = start(Embeds, {})
        train = sw.step(squares)
        dtypes = []
        for number in range(2):
            if number:
                model.float()
                model.zero_grad()
            dtypes.append(str(train(model, batches(0, 1)[0])[0].dtype))
        return dtypes, all(p.grad.dtype is torch.float32 for p in model.local_parameters())

    for found in run_ranks(job, 2):
        assert found == (["torch.float64", "torch.float32"], True)


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
    train = sw.step(squares)
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

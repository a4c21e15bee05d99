"""Numbers that ranks update with: replicas had other learning rates, and stages another Prodigy each."""

import itertools
import logging
import re
from typing import Any

import pytest
import torch
from test_changes_between_steps import Stack, batches, start
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

DP = {"data_parallel_degree": 2}


def trainer(sw: Any) -> Any:
    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    return train


class Ratio(Optimizer):
    """Has a step size over all parameters, as Prodigy has: it grows with what they have moved."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr, "d": 1.0, "moved": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        moved = 0.0
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                start = self.state[p].setdefault("start", p.clone())
                moved += (p.grad * (start - p)).sum().item()
        for group in self.param_groups:
            group["moved"] += moved
            group["d"] = 1.0 + group["moved"]
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"] * group["d"])


class Clips(torch.optim.SGD):
    """Clips by a norm of all gradients in its step, as LAMB of timm does; no number of a group tells."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm() if gradients else 1.0
        for gradient in gradients:
            gradient.div_(norm)
        super().step()


class Sam(Optimizer):
    """Climbs along the gradient of all parameters, then descends by another optimizer."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})
        self.base = torch.optim.SGD(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        found = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in found]).norm()
        for p in found:
            p.add_(p.grad / norm)

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


class OwnList(Clips):
    """Has its parameters in a list beside the groups."""

    def __init__(self, params: Any):
        super().__init__(params)
        self.all = list(self.param_groups[0]["params"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = torch.stack([p.grad.norm() for p in self.all if p.grad is not None]).norm()
        for p in (p for p in self.all if p.grad is not None):
            p.sub_(p.grad / norm)


class LastRate(torch.optim.SGD):
    """Leaves in its group the learning rate of the parameter that came last, as Adafactor of timm does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                group["lr"] = 1e-2 * p.norm().item()
                p.sub_(p.grad, alpha=group["lr"])


def train_with(kind: Any, config: dict[str, Any], *, wrapped: bool = True, first_step: bool = False) -> float:
    """The largest difference from a plain loop, which has the same optimizer."""
    sw, plain, model = start(Stack, config)
    own = kind(model.module.parameters())
    optimizer = sw.DistributedOptimizer(own) if wrapped else own
    theirs = kind(plain.parameters())
    train = trainer(sw)
    for number in range(3):
        x = batches(number, 1)[0]
        optimizer.zero_grad()
        train(model, x)
        theirs.zero_grad()
        for part in x.tensor_split(4):
            (plain(part).square().mean() / 4).backward()
        if first_step:
            optimizer.first_step()
        optimizer.step()
        theirs.step()
    state = model.state_dict()
    return max((state[name] - value).abs().max().item() for name, value in plain.state_dict().items())


@pytest.mark.parametrize(
    ("kind", "wrapped", "by"),
    [
        (Ratio, True, r"knows of all \(by d, moved in its groups\)"),
        (Clips, False, "knows of all, and each rank"),
        (OwnList, True, "knows of all, and each rank"),
    ],
)
def test_an_optimizer_that_needs_all_parameters_is_refused_over_stages(kind, wrapped, by):
    with pytest.raises(RanksFailedError, match=rf"{kind.__name__} updates each parameter by what it {by}"):
        run_ranks(train_with, 2, kind, {}, wrapped=wrapped)


def test_so_is_a_method_of_its_own():
    with pytest.raises(RanksFailedError, match=r"Sam updates each parameter by what it knows of all"):
        run_ranks(train_with, 2, Sam, {}, first_step=True)


def stepping(kind: Any, way: str, config: dict[str, Any]) -> float:
    """With an optimizer that is not wrapped; returns the largest difference from a plain loop."""
    sw, plain, model = start(Stack, config)
    train = trainer(sw)
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


WAYS = [(SamWithClosure, "closure"), (SamWithClosure, "two steps"), (torch.optim.LBFGS, "closure")]


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_an_optimizer_that_is_not_wrapped_and_needs_all_parameters(kind, way):
    """It could not be tried, or nobody heard of its methods."""
    with pytest.raises(RanksFailedError, match=rf"{kind.__name__} updates each parameter by what it"):
        run_ranks(stepping, 2, kind, way, {})


@pytest.mark.parametrize(("kind", "way"), WAYS)
def test_it_is_exact_over_replicas(kind, way):
    for difference in run_ranks(stepping, 2, kind, way, DP):
        assert difference < 1e-10


class NeedsGraph(torch.optim.SGD):
    """Wants second derivatives, as Sophia does: it cannot be tried."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("gradients have no graph")


def untried() -> list[str]:
    from shardwright.torch import coupling

    sw, _, model = start(Stack, {})
    told: list[str] = []
    coupling.log.addHandler(handler := logging.Handler())
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    trainer(sw)(model, batches(0, 1)[0])
    optimizer = sw.DistributedOptimizer(NeedsGraph(model.parameters()))
    with pytest.raises(RuntimeError, match="no graph"):
        optimizer.step()
    return told


def test_what_cannot_be_tried_is_said():
    first, other = run_ranks(untried, 2)
    assert "NeedsGraph could not be tried on small parameters (RuntimeError: gradients have no" in first[0]
    assert not other


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (Ratio, DP),
        (Ratio, {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 0}),
        (Clips, DP),
        (torch.optim.Adafactor, {}),
        (LastRate, {}),
    ],
)
def test_optimizers_that_are_exact(kind, config):
    """Replicas and ranks that share rows see all parameters; others need one at a time."""
    for difference in run_ranks(train_with, 2, kind, config):
        assert difference < 1e-10


def with_schedule(what: str, config: dict[str, Any]) -> float:
    sw, _, model = start(Stack, config)
    rate = torch.tensor(0.5) if what == "tensor" else 0.5
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate, foreach=False))
    if what == "loss":
        schedule: Any = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    else:
        schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    train = trainer(sw)
    x = batches(0, 2)[sw.dp_rank()]
    for number in range(4):
        optimizer.zero_grad()
        loss = train(model, x).reduce_mean().item()
        optimizer.step()
        if what == "loss":
            schedule.step(1.0 if sw.dp_rank() == 0 else loss - number)  # it stays, and it falls
        elif what == "momentum" and number == 1 and sw.rank() == 1:
            optimizer.param_groups[0]["momentum"] = 0.1
        elif what == "tensor" and number == 1 and sw.dp_rank() == 1:
            optimizer.param_groups[0]["lr"].mul_(0.5)
        if what == "schedule":
            schedule.step()
    return float(optimizer.param_groups[0]["lr"])


@pytest.mark.parametrize(
    ("what", "config", "text"),
    [
        (
            "loss",
            DP,
            r"in step 3, lr of parameter group 0 of SGD is 0\.25 on rank 0 and 0\.5 on rank 1\. They are",
        ),
        ("tensor", DP, r"in step 3, lr of parameter group 0 of SGD is 0\.5 on rank 0 and 0\.25 on rank 1\."),
        (
            "momentum",
            {},
            r"in step 3, momentum of .* is 0 on rank 0 and 0\.1 on rank 1\. They have parts of one model",
        ),
    ],
)
def test_ranks_that_update_with_other_numbers(what, config, text):
    """Their weights drifted apart, and `state_dict` gave those of the first."""
    outcomes = run_ranks_outcomes(with_schedule, 2, what, config, timeout_s=60)
    assert [outcome.error_type for outcome in outcomes] == ["UsageError"] * 2
    assert re.search(text, str(outcomes[0].exception))


def updates_on_one_rank(wrapped: bool, config: dict[str, Any]) -> None:
    """As where each replica leaves out an update by its own loss."""
    sw, _, model = start(Stack, config)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrapped:
        optimizer = sw.DistributedOptimizer(optimizer)
    train = trainer(sw)
    for number in range(3):
        optimizer.zero_grad()
        train(model, batches(number, 1)[0])
        if number != 1 or sw.rank() == 0:
            optimizer.step()


@pytest.mark.parametrize(("wrapped", "config"), [(True, DP), (False, DP), (True, {})])
def test_ranks_that_make_another_number_of_updates(wrapped, config):
    """Their weights drifted apart."""
    outcomes = run_ranks_outcomes(updates_on_one_rank, 2, wrapped, config, timeout_s=60)
    assert [outcome.error_type for outcome in outcomes] == ["UsageError"] * 2
    expected = "in step 3, the number of updates that SGD has made is 2 on rank 0 and 1 on rank 1. They train"
    assert expected in str(outcomes[0].exception)


def test_a_schedule_that_is_the_same_everywhere():
    assert len(set(run_ranks(with_schedule, 2, "schedule", {}))) == 1


def numbers_of_stages() -> None:
    """Stages have other learning rates from the start, and one has no parameter in the second group."""
    sw, _, model = start(Stack, {})
    module = model.module

    class Counts(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                if any(p.grad is not None for p in group["params"]):
                    group["count"] = group.get("count", 0) + 1
            super().step()

    groups: list[dict[str, Any]] = [
        {"params": list(module.blocks.parameters()), "lr": 0.1 * (1 + sw.pp_rank()), "count": 0},
        {"params": list(module.head.parameters()), "lr": 0.1, "count": 0},
    ]
    optimizer = sw.DistributedOptimizer(Counts(groups))
    train = trainer(sw)
    for number in range(3):
        optimizer.zero_grad()
        train(model, batches(number, 1)[0])
        optimizer.step()


def test_numbers_that_may_differ_between_stages():
    run_ranks(numbers_of_stages, 2)


def saved_apart(folder: str) -> None:
    sw, _, model = start(Stack, DP)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints = sw.Checkpoints(folder)
    trainer(sw)(model, batches(0, 1)[0])
    optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1 * (1 + sw.rank())
    checkpoints.save(1)


def test_nothing_is_saved_of_replicas_that_drift(tmp_path):
    with pytest.raises(RanksFailedError, match=r"in step 1, lr of .* is 0\.1 on rank 0 and 0\.2 on rank 1"):
        run_ranks(saved_apart, 2, str(tmp_path))

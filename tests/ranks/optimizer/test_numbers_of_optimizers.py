"""Numbers that ranks update with: replicas had other learning rates."""

import re
from typing import Any

import pytest
import torch
from stacks import Stack, batches, start
from stacks import train as squares
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

import shardwright.torch as sw
from shardwright.testing import run_ranks, run_ranks_outcomes

DP = {"data_parallel_degree": 2}


def of_all_replicas(own: float, remedy: str) -> float:
    """What comes of a loss by the code that the error shows."""
    loss = torch.tensor(own)
    exec(remedy, {"torch": torch, "sw": sw, "loss": loss})
    return float(loss)


def with_schedule(what: str, config: dict[str, Any], *, remedy: str | None = None) -> float:
    sw, _, model = start(Stack, config)
    rate = torch.tensor(0.5) if what == "tensor" else 0.5
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=rate, foreach=False))
    if what == "loss":
        schedule: Any = ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    else:
        schedule = LambdaLR(optimizer, lambda step: 0.9**step)
    train = sw.step(squares)
    x = batches(0, 2)[sw.dp_rank()]
    for number in range(4):
        optimizer.zero_grad()
        loss = train(model, x).reduce_mean().item()
        optimizer.step()
        own = 1.0 if sw.dp_rank() == 0 else loss - number  # it stays, and it falls
        if what == "loss":
            schedule.step(own if remedy is None else of_all_replicas(own, remedy))
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


def updates_on_one_rank(wrapped: bool, config: dict[str, Any], left_out: int) -> None:
    """As where each replica leaves out an update by its own loss."""
    sw, _, model = start(Stack, config)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    if wrapped:
        optimizer = sw.DistributedOptimizer(optimizer)
    train = sw.step(squares)
    for number in range(left_out + 2):
        optimizer.zero_grad()
        train(model, batches(number, 1)[0])
        if number != left_out or sw.rank() == 0:
            optimizer.step()


@pytest.mark.parametrize(("wrapped", "config", "left_out"), [(True, DP, 1), (False, DP, 1), (True, {}, 3)])
def test_ranks_that_make_another_number_of_updates(wrapped, config, left_out):
    """Their weights drifted apart."""
    outcomes = run_ranks_outcomes(updates_on_one_rank, 2, wrapped, config, left_out, timeout_s=60)
    assert [outcome.error_type for outcome in outcomes] == ["UsageError"] * 2
    expected = (
        f"in step {left_out + 2}, the number of updates that SGD has made is {left_out + 1} on rank 0 and "
        f"{left_out} on rank 1. They train"
    )
    assert expected in str(outcomes[0].exception)


def test_stages_that_make_another_number_of_first_updates():
    """Stages compare what a script did to gradients, before each of the first updates."""
    outcomes = run_ranks_outcomes(updates_on_one_rank, 2, True, {}, 1, timeout_s=60)
    assert "optimizer.step(), model.state_dict()" in str(outcomes[1].exception)


def test_a_schedule_that_is_the_same_everywhere():
    assert len(set(run_ranks(with_schedule, 2, "schedule", {}))) == 1


class Counts(torch.optim.SGD):
    """Counts the updates of each group."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            if any(p.grad is not None for p in group["params"]):
                group["count"] = group.get("count", 0) + 1
        super().step()


def numbers_of_stages() -> None:
    """Stages have other learning rates from the start, and one has no parameter in the second group."""
    sw, _, model = start(Stack, {})
    module = model.module

    groups: list[dict[str, Any]] = [
        {"params": list(module.blocks.parameters()), "lr": 0.1 * (1 + sw.pp_rank()), "count": 0},
        {"params": list(module.head.parameters()), "lr": 0.1, "count": 0},
    ]
    optimizer = sw.DistributedOptimizer(Counts(groups))
    train = sw.step(squares)
    for number in range(3):
        optimizer.zero_grad()
        train(model, batches(number, 1)[0])
        optimizer.step()


def test_numbers_that_may_differ_between_stages():
    run_ranks(numbers_of_stages, 2)

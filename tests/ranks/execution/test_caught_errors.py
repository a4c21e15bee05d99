"""Tells the other ranks of a step's error, even where the script of the failing rank catches it.

Ranks that share parameters, and of which one does something else: the others end, and say which one.

Units that return memory of their own, and use it again in the next microbatch.
"""

import re
from datetime import timedelta

import pytest
import torch
import torch.nn.functional as F
from sharded import QUIET, Net, batches, on_hosts, wish
from sharded import train as train_language
from stacks import train as squares
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH, Stack

import shardwright.torch as sw
from shardwright.testing import run_ranks, run_ranks_outcomes

MICROBATCHES = 12  # more than a sender may leave unread


class FailsOnce(nn.Module):
    """Fails in the third microbatch of a run."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += not sw.is_tracing()
        if self.calls == 3:
            raise ValueError("an odd batch")
        return x @ self.weight


def test_a_rank_that_waits_for_one_that_caught_its_error_is_told() -> None:
    """It waited until the timeout, or until the process of the other ended."""

    def run() -> str:
        from shardwright.comm.joining.process_group import default_store

        sw.init(
            {
                "pipeline_parallel_degree": 2,
                "microbatches": MICROBATCHES,
                "pipeline": "1f1b",
                "auto_partition": False,
                "default_partition": 0,
                "profile": "estimated",
                "run_dir": "off",
            }
        )
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), FailsOnce())
        sw.set_partition(net[2], 1)
        model = sw.DistributedModel(net)
        step = sw.step(squares)
        store = default_store()
        try:
            step(model, torch.ones(MICROBATCHES, 8))
        except Exception as error:
            if sw.rank() == 0:
                store.set("told", "")
            else:
                store.wait(["told"], timedelta(seconds=20))
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_ranks(run, 2)
    assert first.startswith("PeerLostError: rank 1 failed first (ValueError: an odd batch)")
    assert second.startswith("ValueError: an odd batch")


TIMEOUT_S = 3


def out_of_step(ranks_per_host, degree, *, skips):
    """Rank 1 skips a step, or has another number of microbatches."""
    on_hosts(ranks_per_host)
    is_other = torch.distributed.get_rank() == 1
    sw.init(
        {
            **QUIET,
            "sharded_data_parallel_degree": degree,
            "timeout_s": TIMEOUT_S,
            "microbatches": 2 if is_other and not skips else 1,
            **wish({"every": not skips}),
        }
    )
    torch.manual_seed(0)
    model = sw.DistributedModel(Net().double())
    updates = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = sw.step(train_language)
    for number, (x, y) in enumerate(batches(3)):
        if not (is_other and skips and number == 1):
            train(model, x, y)
            updates.step()
    model.state_dict()


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "degree", "skips"),
    [(2, 1, 2, True), (4, 2, 2, False)],
)
def test_a_rank_out_of_step(num_ranks, ranks_per_host, degree, skips):
    """Between hosts, a message larger than the memory for it had gloo abort the process that was behind."""
    outcomes = run_ranks_outcomes(out_of_step, num_ranks, ranks_per_host, degree, skips=skips, timeout_s=60)
    for outcome in outcomes:
        known = ("ConfigError", "PeerLostError", "PeerTimeoutError", "TraceMismatchError", "UsageError")
        assert outcome.error_type in known, outcome.cause
        assert outcome.seconds < TIMEOUT_S + 20
        named = set(map(int, re.findall(r"rank (\d)", outcome.error_line))) - {outcome.rank}
        assert 1 in named or outcome.rank == 1
        assert named
    if num_ranks == 2 and ranks_per_host == 1:
        # One of them gives up, or finds out that the other is elsewhere; the other may see that it has ended.
        reasons = ("raise the setting timeout_s", "model.state_dict() is to be called by all of ranks 0, 1")
        assert any(reason in outcome.cause for reason in reasons for outcome in outcomes)


V = Case(config={"microbatches": 4, "profile": "estimated", "pipeline": "zb_v"}, iterations=[Iteration()] * 2)


class Centre(nn.Linear):
    """Returns its running mean; on random data, if it looks at values."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.looks = looks

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(F.linear(x, self.weight, self.bias))
        if self.looks and y.mean() > 2:
            y = y / 2
        with torch.no_grad():
            self.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
        return y, self.mean


class UsesMeansLater(Stack):
    """One of the means is also changed between units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = Centre(), Centre(looks=True), Centre()

    def forward(self, x: Tensor) -> Tensor:
        x, first = self.first(x)
        x, second = self.second(x)
        x, third = self.third(x)
        if self.training:
            third.mul_(0.5)
        for block in self.blocks:
            x = block(x)
        return self.head(x - first + second * third)


def test_what_the_next_microbatch_overwrites():
    """The next stage of the same rank was given what the next microbatch had left; backwards failed."""
    assert run_ranks(differences, 2, Recipe(build=UsesMeansLater, batch=features, loss=classify), V) == [
        [],
        [],
    ]

"""Ranks that share parameters, and of which one does something else: the others end, and say which one."""

import re
from typing import Any

import pytest
import torch
from sharded import QUIET, Net, batches, loss_of, on_hosts, wish
from torch import Tensor

from choices import in_sweep
from shardwright.testing import run_ranks_outcomes

TIMEOUT_S = 3


def out_of_step(ranks_per_host, degree, *, skips):
    """Rank 1 skips a step, or has another number of microbatches."""
    on_hosts(ranks_per_host)
    import shardwright.torch as sw

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

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        model.backward(loss)
        return loss

    for number, (x, y) in enumerate(batches(3)):
        if not (is_other and skips and number == 1):
            train(model, x, y)
            updates.step()
    model.state_dict()


@pytest.mark.parametrize(
    ("num_ranks", "ranks_per_host", "degree", "skips"),
    [
        (2, 1, 2, True),
        (4, 2, 2, False),
        in_sweep(2, 1, 2, False),
        in_sweep(4, 2, 2, True),
        *(in_sweep(2, 4, 2, skips) for skips in (True, False)),
        *(in_sweep(4, 2, 4, skips) for skips in (True, False)),
    ],
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

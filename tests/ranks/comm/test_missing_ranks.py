"""Calls on all ranks that some ranks never make: the others say which, within seconds.

The ranks have a timeout of a minute, and a patience of half of one: none of these errors waits for that.

Ranks of several hosts to which nobody has given a secret: they train, and load no pickle of each other.
"""

import os
import signal
import time
from collections import namedtuple

import pytest
import torch
import torch.distributed as dist
from stacks import train as squares
from torch import nn

import shardwright.torch as sw
from choices import thorough
from shardwright.comm import whereabouts
from shardwright.comm.joining.process_group import seal_of_session
from shardwright.errors import UsageError
from shardwright.testing import run_ranks, run_ranks_outcomes

QUIET = {
    "run_dir": "off",
    "profile": "estimated",
    "microbatches": 2,
    "timeout_s": 60,
}


class Script:
    """A model on its stages, after one step."""

    def __init__(self, **settings):
        sw.init({**QUIET, **settings})
        torch.manual_seed(0)
        self.sw, self.x = sw, torch.ones(4, 4)
        self.model = sw.DistributedModel(nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))))
        train = sw.step(squares)
        self.train = train
        train(self.model, self.x)


def outcomes(job, num_ranks, *args):
    started = time.monotonic()
    found = run_ranks_outcomes(job, num_ranks, *args, timeout_s=50)
    assert time.monotonic() - started < 25
    return found


def on_one_rank(settings, elsewhere):
    script = Script(**settings)
    if script.sw.rank() == 0:
        if elsewhere == "end before":
            time.sleep(1)
        script.model.state_dict()
    elif elsewhere == "step":
        script.train(script.model, script.x)
    elif elsewhere == "torch's barrier":
        dist.barrier()
    elif elsewhere in ("end", "end before"):
        script.sw.shutdown()
    elif elsewhere == "error":
        raise ValueError("boom")


@pytest.mark.parametrize(
    ("elsewhere", "shared_memory"),
    [
        thorough("torch's barrier", True),
        ("end before", True),
        ("end", True),
        ("return", False),
        ("step", False),
        ("error", True),
    ],
)
def test_state_dict_on_the_first_rank_alone(elsewhere, shared_memory):
    settings = {"shared_memory": shared_memory, "timeout_s": 60}
    first, *_ = outcomes(on_one_rank, 2, settings, elsewhere)
    assert "model.state_dict() is to be called by all of ranks 0, 1" in first.cause
    said = {
        "step": "rank 1 failed first (TraceMismatchError" if shared_memory else "is in the step function",
        "torch's barrier": "rank 1 waits in torch.distributed.barrier",
        "end": "rank 1 has called sw.shutdown()",
        "end before": "rank 1 has called sw.shutdown()",
        "return": "rank 1 has come to the end of its script",
        "error": "rank 1 failed first (ValueError: boom)",
    }
    assert said[elsewhere] in first.cause


@pytest.mark.thorough
def test_ranks_that_share_parameters():
    """Two stages on two replicas that share parameters: all four have to come."""

    def job():
        script = Script(
            pipeline_parallel_degree=2, sharded_data_parallel_degree=2, sdp_param_persistence_threshold=0
        )
        if script.sw.rank() != 3:
            script.model.state_dict()
        else:
            script.train(script.model, script.x)

    for outcome in outcomes(job, 4):
        assert outcome.error_type in ("UsageError", "PeerLostError", "TraceMismatchError")
        if outcome.rank != 3:
            assert "model.state_dict() is to be called by all of ranks 0 to 3" in outcome.cause
            assert "rank 3" in outcome.cause


def test_a_replica_may_ask_for_its_state_alone():
    """As scripts do that save where ``dp_rank() == 0``; then all go on."""

    def job():
        script = Script(data_parallel_degree=2)
        for _ in range(3):
            if script.sw.dp_rank() == 0:
                script.model.state_dict()
            script.train(script.model, script.x)
            script.sw.barrier()
        return script.model.state_dict().keys()

    assert len(set(map(tuple, run_ranks(job, 4)))) == 1


def test_a_slow_rank_is_waited_for_and_named():
    def job():
        script = Script(shared_memory=False, timeout_s=15)
        if script.sw.rank() == 1:
            time.sleep(1.5)
            return len(script.model.state_dict())
        with pytest.warns(UserWarning, match="Rank 1 has not come after 1 s"):
            return len(script.model.state_dict())

    assert run_ranks(job, 2) == [8, 8]


def test_an_evaluation_on_one_replica_is_told_what_it_lacks():
    """Such a step waits for the other replicas, because gradients might be summed at its end."""

    def job():
        script = Script(data_parallel_degree=2, pipeline_parallel_degree=1, shared_memory=False)

        @script.sw.step
        def evaluate(model, x):
            return model(x).sum()

        if script.sw.rank() == 1:
            script.sw.barrier()
        else:
            script.train(script.model, script.x)

    _, second = outcomes(job, 2)
    assert "sw.barrier() is to be called by all of ranks 0, 1" in second.cause
    assert "call it under torch.no_grad()" not in second.cause


@pytest.mark.thorough
def test_behind_a_call_that_failed_ranks_do_not_pass_each_other():
    """Rank 0 went on, and the next barrier of rank 1 took its failed one for the next."""

    def job():
        whereabouts._proof = lambda *_: ""  # which would end rank 1 first
        script = Script(pipeline_parallel_degree=2, timeout_s=15)
        if script.sw.rank() == 1:
            dist.barrier()
            return ""
        with pytest.raises(UsageError, match="will not"), pytest.warns(UserWarning, match="has not come"):
            script.sw.barrier()
        dist.barrier()
        with pytest.raises(UsageError, match="after a call of the same ranks has failed") as caught:
            script.sw.barrier()
        return str(caught.value)

    assert "Rank 1 has not come after" in run_ranks(job, 2)[0]


def test_a_killed_rank_is_named_though_the_store_has_gone_with_it():
    """Rank 0 serves the store, which was asked for the last words of that rank."""

    def job():
        script = Script(pipeline_parallel_degree=2)
        if script.sw.rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1)
        script.sw.barrier()

    killed, waits = outcomes(job, 2)
    assert killed.exit_code == -signal.SIGKILL
    assert waits.error_type == "PeerLostError"
    assert "rank 0" in waits.cause


Pair = namedtuple("Pair", ["data", "scale"])


def two_hosts(rank):
    """As torchrun tells ranks that are alone on their hosts."""
    return {
        "GROUP_RANK": str(rank),
        "GROUP_WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "SHARDWRIGHT_SECRET": None,
        "SHARDWRIGHT_SECRET_FILE": None,
    }


class Remembers(nn.Linear):
    def __init__(self, memory):
        super().__init__(4, 4)
        self.memory = memory

    def get_extra_state(self):
        return self.memory

    def set_extra_state(self, state):
        self.memory = state


def train(memory):
    sw.init({"pipeline_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "run_dir": "off"})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(Remembers(memory), nn.Linear(4, 1)))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

    @sw.step
    def step(model, pair, options):
        loss = (model(pair.data) * pair.scale).square().mean() * options["weight"]
        model.backward(loss)
        return loss

    batch = Pair(torch.arange(16.0).view(4, 4) / 16, 0.5)
    losses = []
    for _ in range(2):
        losses.append(float(step(model, batch, {"weight": 2.0}).reduce_mean()))
        optimizer.step()
        optimizer.zero_grad()
    return seal_of_session() is None, losses, sorted(model.state_dict())


def plain_losses():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(2):
        loss = (model(torch.arange(16.0).view(4, 4) / 16) * 0.5).square().mean() * 2.0
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_they_train_and_gather_states():
    for has_none, losses, names in run_ranks(train, 2, {"calls": 3}, env=two_hosts):
        assert has_none
        assert losses == pytest.approx(plain_losses(), rel=1e-6)
        assert "0._extra_state" in names

"""Ranks with other numbers of batches: those with more said that a peer was lost, and not why."""

import logging
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from stacks import Stack, batches, start
from stacks import train as squares
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks, run_ranks_outcomes

DP = {"data_parallel_degree": 2, "timeout_s": 20}


def train_unevenly(config: dict[str, Any], *, then: str = "") -> None:
    """Rank 0 has data for 3 steps, rank 1 for 5."""
    sw, _, model = start(Stack, config)
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    train = sw.step(squares)
    for number in range(3 + 2 * sw.rank()):
        optimizer.zero_grad()
        train(model, batches(number, 2)[sw.dp_rank()])
        optimizer.step()
    if then == "barrier":
        sw.barrier()


OUT_OF_DATA = r"rank 0 ran out of data, or left the loop, after step 3, and rank 1 began step 4"


def script_that_ends(config: dict[str, Any]) -> None:
    train_unevenly(config)
    sw.shutdown()


@pytest.mark.parametrize("then", ["", "barrier"])
def test_they_say_who_ran_out_of_data(then):
    """One that has ended, and one that waits in another call."""
    function = train_unevenly if then else script_that_ends
    options = {"then": then} if then else {}
    outcomes = run_ranks_outcomes(function, 2, {**DP, "timeout_s": 5}, timeout_s=60, **options)
    first = outcomes[0 if then else 1]
    if not then:
        assert re.search(OUT_OF_DATA, str(first.exception)), first.cause
        return
    for outcome in outcomes:
        assert "sw.barrier()" in outcome.error
        assert "ran out of data: give all ranks as many batches (sw.data_loader does)" in outcome.error


def joined() -> None:
    _, _, model = start(Stack, DP)
    model.join()


def test_join_says_what_to_do_instead() -> None:
    with pytest.raises(RanksFailedError, match=r"Give all ranks as many batches \(sw\.data_loader does\)"):
        run_ranks(joined, 2)


def evaluated_once(settings: dict[str, Any]) -> list[float]:
    """As docs/script.md has it: the outputs of all replicas, in the order of the data set, and sums."""
    sw.init({"run_dir": "off", "profile": "estimated", "microbatches": 1, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)))
    data = torch.utils.data.TensorDataset(torch.arange(13.0)[:, None])

    @sw.step
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x) * 0 + x

    outputs, sums = [], torch.zeros(2)
    sampler = sw.distributed_sampler(data, shuffle=False)
    model.eval()
    with torch.no_grad():
        for (x,) in torch.utils.data.DataLoader(data, 4, sampler=sampler):
            z = evaluate(model, x).concat()
            parts = [torch.empty_like(z) for _ in range(sw.rdp_size())]
            dist.all_gather(parts, z, group=sw.get_dp_process_group())
            outputs.append(torch.stack(parts, 1).flatten(0, 1))
        for (x,) in sw.data_loader(data, 4, shuffle=False, drop_last=False):
            sums += torch.stack([evaluate(model, x).concat().sum(), torch.tensor(len(x))])
    dist.all_reduce(sums, group=sw.get_dp_process_group())
    return [*torch.cat(outputs)[: len(data)].flatten().tolist(), *sums.tolist()]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_over_replicas_has_each_sample_once(ranks: int) -> None:
    """A sampler repeats samples to fill replicas up, and the loader left some out: 14 or 12 of 13.

    On one rank, the same script had no process group.
    """
    found = run_ranks(evaluated_once, ranks, {"pipeline_parallel_degree": 1})
    assert found == [[*map(float, range(13)), 78.0, 13.0]] * ranks


def accumulate() -> list[float]:
    """Two steps under `no_sync`, and one outside."""
    sw, plain, model = start(Stack, DP)
    train = sw.step(squares)
    with model.no_sync():
        for number in (0, 1):
            train(model, batches(number, 2)[sw.dp_rank()])
    train(model, batches(2, 2)[sw.dp_rank()])
    for number in range(3):
        for part in batches(number, 2).flatten(0, 1).tensor_split(8):
            (plain(part).square().mean() / 8).backward()
    expected = dict(plain.named_parameters())
    return [(p.grad - expected[n].grad).abs().max().item() for n, p in model.local_named_parameters()]


def test_no_sync():
    for differences in run_ranks(accumulate, 2):
        assert max(differences) < 1e-10


def said_of_samplers() -> list[str]:
    sw.init({"run_dir": "off", "profile": "estimated", "pipeline_parallel_degree": 1})
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright.torch.data").addHandler(handler)
    sw.distributed_sampler(range(12), shuffle=False)
    sw.distributed_sampler(range(13))
    sw.distributed_sampler(range(13), shuffle=False, drop_last=True)
    assert not said
    sw.distributed_sampler(range(13), shuffle=False)
    return said


def test_a_sampler_tells_what_it_gives_twice() -> None:
    first, second = run_ranks(said_of_samplers, 2)
    assert [text.split(". ")[0] for text in first] == [
        "13 samples over 2 replicas: the sampler gives 1 of them twice"
    ]
    assert second == []

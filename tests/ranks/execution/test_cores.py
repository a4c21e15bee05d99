"""During a step, a rank computes on cores of its own."""

import os

import pytest
import torch
from torch import nn

from shardwright.testing import run_ranks


def cores_of_a_step(**settings):
    import shardwright.torch as sw

    sw.init({"run_dir": "off", "microbatches": 2, **settings})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    seen = []

    @sw.step
    def train(model, x):
        seen.append(os.sched_getaffinity(0))
        loss = model(x).mean()
        model.backward(loss)
        return loss

    before = os.sched_getaffinity(0)
    for _ in range(2):
        train(model, torch.ones(4, 4))
    return seen[-1], before, os.sched_getaffinity(0)


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores"
)
def test_ranks_do_not_share_cores_during_a_step():
    (first, before, after), (second, _, _) = run_ranks(cores_of_a_step, 2)
    assert first
    assert second
    assert not first & second
    assert before == after
    assert first < before


@pytest.mark.thorough
def test_too_many_ranks_are_left_alone():
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    if cores > 4:
        pytest.skip("more cores than ranks")
    for inside, outside, _ in run_ranks(cores_of_a_step, 4 if cores < 4 else 8, pipeline_parallel_degree=2):
        assert inside == outside

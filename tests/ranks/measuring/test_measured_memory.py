"""The memory in use, as a run's timeline has it."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import nn

from shardwright.observe import RunFolder
from shardwright.observe.recorded_steps import read_recorded_steps
from shardwright.observe.report.facts import read_facts
from shardwright.testing import run_ranks

MIB = 2**20
WIDTH, ROWS = 128, 32768  # what a linear layer gives back for a microbatch: 16 MiB
STAGES = 2


def train(folder):
    import shardwright.torch as sw

    settings = {"pipeline_parallel_degree": STAGES, "microbatches": 4, "pipeline": "gpipe", "trace": True}
    sw.init({**settings, "profile": "estimated", "run_dir": folder, "run_name": "run", "steps": 4})
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Sigmoid()) for _ in range(2 * STAGES)]
    model = sw.DistributedModel(nn.Sequential(*layers))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))

    @sw.step
    def train_step(model, x):
        model.backward(model(x).square().mean())

    for _ in range(4):
        model.zero_grad()
        train_step(model, torch.ones(4 * ROWS, WIDTH))
        optimizer.step()
    sw.shutdown()


@pytest.mark.thorough
def test_every_forward_of_gpipe_adds_what_it_keeps(tmp_path: Path) -> None:
    run_ranks(train, STAGES, str(tmp_path))
    events = json.loads((tmp_path / "run/trace.json").read_text())["traceEvents"]
    for rank in range(STAGES):
        looked = [
            e["args"]["bytes"]
            for e in events
            if e["ph"] == "C" and e["pid"] == rank and "in use" in e["name"]
        ]
        assert len(looked) == 8
        forwards, backwards = looked[:4], looked[4:]
        # The outputs of two sigmoids, of which the first is the input of a linear layer.
        kept = [later - earlier for earlier, later in pairwise(forwards)]
        assert all(24 * MIB < each < 60 * MIB for each in kept), kept
        assert backwards[-1] < forwards[-1] - 3 * 24 * MIB
    # Bug: only runs with `trace` left measured times of actions; every run records two steps now.
    early, last = read_recorded_steps(RunFolder(tmp_path / "run"))
    assert (early.step, last.step) == (3, 4)
    facts = read_facts(RunFolder(tmp_path / "run"))
    assert facts.model == "Sequential"
    assert facts.versions["torch"] == torch.__version__
    assert facts.settings["steps"] == "4"
    for step in (early, last):
        assert [event.rank for event in step.events] == [0] * 8 + [1] * 8
        assert max(event.end_s for event in step.events) < step.seconds
        for rank, after in enumerate(step.memory):
            # Two layers, each with weight, bias, their gradients and momenta.
            assert after.state_bytes == 2 * 3 * 4 * (WIDTH * WIDTH + WIDTH)
            peak = max(event.bytes_in_use for event in step.events if event.rank == rank)
            # Of four microbatches: two outputs of sigmoids, the input of the second stage, a message each.
            assert 4 * 24 * MIB < peak - after.in_use_bytes < 4 * 80 * MIB


def train_divided(folder):
    import shardwright.torch as sw

    settings = {"tensor_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "report": False}
    sw.init({**settings, "run_dir": folder, "run_name": "run"})
    model = sw.DistributedModel(nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 64)))

    @sw.step
    def train_step(model, x):
        model.backward(model(x).square().mean())

    for _ in range(3):
        train_step(model, torch.ones(8, 64))
    sw.shutdown()


def test_a_rank_that_shares_layers_counts_its_own_part(tmp_path: Path) -> None:
    run_ranks(train_divided, 2, str(tmp_path))
    (step,) = read_recorded_steps(RunFolder(tmp_path / "run"))
    whole = 2 * 4 * (2 * 64 * 512 + 512 + 64)  # parameters and gradients
    (after,) = step.memory
    assert 0.49 * whole < after.state_bytes < 0.52 * whole

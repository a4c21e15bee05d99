"""A long trace tells how far it is: 80 layers were traced for minutes without a word."""

import torch
from planner.machines import machines
from torch import nn

from shardwright.config import Config
from shardwright.torch.units.dry_run import graph_of
from shardwright.torch.units.offline_planner import plan_model


def test_every_call_is_told_and_the_last_one_is_the_end():
    told = []
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    graph = graph_of(
        model,
        ((torch.empty(2, 8),), {}),
        loss=None,
        num_stages=6,
        device=torch.device("cpu"),
        progress=lambda done, total: told.append((done, total)),
    )
    assert [done for done, _ in told] == sorted({done for done, _ in told})
    assert told[0] == (1, 7)  # modules
    assert told[-1] == (7 + len(graph.calls), 7 + len(graph.calls))


def test_a_plan_tells_how_far_its_traces_are():
    """`plan` said nothing while it traced 80 layers at four sizes of microbatches."""
    told = []
    plan_model(
        nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))),
        torch.ones(8, 8),
        config=Config(),
        world_size=2,
        cluster=machines(),
        progress=lambda done, total: told.append((done, total)),
    )
    assert told[0] == (1, 7)
    assert told[-1][0] == told[-1][1] > 7 + 6  # each size of microbatches

"""Batch norms: how many samples a microbatch has that the planner chooses."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from graphs import chain_graph, profile_of

from planner.machines import machines
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner import make_plan, microbatch_counts
from shardwright.profile import Profile

LAYERS = ("bn1", "bn2", "bn3", "bn4")


def candidates(
    batch: int, *, layers: tuple[str, ...] = LAYERS, **config: Any
) -> Mapping[int, tuple[ModelGraph, Profile]]:
    """Of a batch of so many samples on two ranks; microbatches cost by their samples."""
    counts = microbatch_counts(batch, config=Config(**config), pipeline=2)
    graph = replace(chain_graph(6), batch_statistics=layers)
    costs = {"embed": (0.4, 0.8), "block": (0.8, 1.6), "head": (0.8, 1.6)}
    return {
        m: (
            replace(graph, batch_size=batch // m),
            profile_of(
                {name: (forward / m, backward / m) for name, (forward, backward) in costs.items()},
                saved_bytes=48_000 / m,
            ),
        )
        for m in counts
    }


def plan(batch: int, layers: tuple[str, ...] = LAYERS, **config: Any) -> Plan:
    return make_plan(
        candidates(batch, layers=layers, **config),
        cluster=machines(),
        config=Config(**config),
        mesh=Mesh.of(world_size=2, pipeline=2),
    )


def said(found: Plan) -> str:
    return next((reason for reason in found.why if "Statistics over the batch" in reason), "")


def test_other_models_are_cut_as_before():
    found = plan(32, layers=())
    assert found.schedule.microbatches > 2
    assert not said(found)


def test_a_microbatch_has_enough_samples():
    """The planner chose 8 microbatches of 4 samples for a batch of 32, and nobody was told."""
    found = plan(32)
    assert found.schedule.microbatches == 2
    assert said(found) == (
        "Statistics over the batch (bn1, bn2, bn3 and 1 more) are those of a microbatch, 16 samples: for 16 "
        "or more in each, the batch is not cut further."
    )
    assert plan(128).schedule.microbatches == 8


def test_statistics_of_the_batch_take_one_microbatch():
    assert said(plan(32, microbatches=1)).endswith("are those of all of it, one microbatch.")

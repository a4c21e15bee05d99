"""No schedule is faster than the bound, and the search finds the same with it.

The order in which candidates are planned, and when no more are.

Batch norms: how many samples a microbatch has that the planner chooses.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from graphs import chain_graph, profile_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from planned import planned

from planner.machines import machines
from planner.test_partition import PROFILE, graphs
from shardwright.config import Config
from shardwright.costs.calibration import ACTION_S
from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner import build_chain, make_plan, microbatch_counts
from shardwright.planner.degrees import plan_survivors
from shardwright.planner.draft import Draft, make_draft
from shardwright.planner.fabric import Fabric
from shardwright.planner.objective import Demands
from shardwright.planner.workload import Workload
from shardwright.profile import Profile
from shardwright.schedule import KINDS, place_stages


def workload(
    graph: ModelGraph,
    profile: Profile,
    *,
    ranks: int,
    m: int,
    replicas: int = 1,
    cores: int = 0,
    **demands: Any,
) -> Workload:
    mesh = Mesh.of(world_size=ranks * replicas, pipeline=ranks, data=replicas)
    return Workload(
        build_chain(graph, profile),
        num_microbatches=m,
        fabric=Fabric(machines(cores_per_node=cores), mesh),
        demands=Demands(**demands),
    )


def test_one_stage_a_rank_reaches_the_bound() -> None:
    costs = {"embed": (0.0, 0.0), "block": (1.0, 2.0), "head": (0.0, 0.0)}
    made = workload(chain_graph(4), profile_of(costs), ranks=4, m=8)
    draft = make_draft(made, "1f1b", (0, 1, 2, 3), cuts=(0, 2, 3, 4, 6))
    # 3 forwards on the way to the last rank, its work, and 3 backwards on the way back.
    assert draft.least_s == pytest.approx(3 + 8 * 3 + 6, abs=0.1)
    assert draft.work_out().step_s == pytest.approx(draft.least_s, abs=0.01)


@given(
    graph=graphs(),
    kind=st.sampled_from(KINDS),
    ranks=st.integers(1, 3),
    m=st.integers(1, 6),
    replicas=st.integers(1, 2),
    cores=st.integers(0, 2),
    recompute=st.sampled_from(["auto", "none", "full"]),
    limit_bytes=st.sampled_from([0, 3000, 10_000]),
    data=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_no_schedule_is_faster(
    graph: ModelGraph,
    kind: str,
    ranks: int,
    m: int,
    replicas: int,
    cores: int,
    recompute: str,
    limit_bytes: int,
    data: st.DataObject,
) -> None:
    demands = {"recompute": recompute, "limit_bytes": limit_bytes}
    made = workload(graph, PROFILE, ranks=ranks, m=m, replicas=replicas, cores=cores, **demands)
    stages = place_stages(kind, num_ranks=ranks)
    calls = made.chain.num_calls
    assume(calls >= len(stages))
    inner = data.draw(st.permutations(range(1, calls)))[: len(stages) - 1]
    draft = make_draft(made, kind, stages, cuts=(0, *sorted(inner), calls))
    assert draft.least_s <= draft.work_out().step_s * (1 + 1e-9)
    assert draft.least_s > made.fabric.step_overhead_s + m * ACTION_S


@pytest.mark.parametrize("seed", range(6))
def test_the_search_finds_the_same_with_less_work(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    costs = [((7 * i + 3 * seed) % 5 + 1) / 4 for i in range(12)]
    classes = {f"c{i}": (cost, 2 * cost) for i, cost in enumerate(costs)}
    graph = chain_graph(len(costs), classes=list(classes))
    profile = profile_of({**classes, "embed": (0.1, 0.2), "head": (1.5, 3.0)})
    simulated = 0
    work_out = Draft.work_out

    def counted(draft: Draft) -> Any:
        nonlocal simulated
        simulated += 1
        return work_out(draft)

    monkeypatch.setattr(Draft, "work_out", counted)

    def found() -> tuple[Plan, int]:
        nonlocal simulated
        simulated = 0
        mesh = Mesh.of(world_size=3, pipeline=3)
        made = make_plan({6: (graph, profile)}, cluster=machines(), config=Config(), mesh=mesh)
        return made, simulated

    bounded, few = found()
    monkeypatch.setattr(Draft, "least_s", property(lambda draft: 0.0))
    exhaustive, many = found()
    assert bounded == exhaustive
    assert few < many


def sieve(expected, actual, **options):
    """Numbers of the candidates that were planned, in that order, and what came of it."""
    asked = []

    def make(number):
        asked.append(number)
        if isinstance(actual[number], PlanError):
            raise actual[number]
        return (planned(),)

    survivors = plan_survivors(
        range(len(expected)), expected, make, seconds=lambda number, plan: actual[number], **options
    )
    return asked, survivors


def test_candidates_are_planned_in_the_order_of_their_closed_forms_until_none_can_be_better() -> None:
    asked, survivors = sieve([2.0, 1.0, 1.4, 1.6], [2.0, 1.0, 1.4, 1.6])
    assert asked == [1, 2]
    assert survivors.num_left_out == 2
    assert [each.seconds for each in survivors.planned] == [1.0, 1.4]


def test_what_closed_forms_say_too_little_of_lets_more_through() -> None:
    asked, _ = sieve([1.0, 1.6, 2.9, 3.1], [2.0, 2.1, 2.0, 2.0])
    assert asked == [0, 1, 2]


@pytest.mark.parametrize("fits", [True, False])
def test_what_will_not_fit_is_planned_where_nothing_else_can_be(fits: bool) -> None:
    first = 1.0 if fits else InfeasiblePlanError("too large")
    asked, survivors = sieve([1.0, inf], [first, 1.0])
    assert asked == ([0] if fits else [0, 1])
    assert survivors.num_left_out == int(fits)


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

"""Seconds of stages correct the costs of units, and with them the cuts of the next plan."""

from typing import Any

import pytest
from graphs import GraphBuilder, profile_of

from planner.machines import machines
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner import corrected_profile, factors_of_units, make_plan, seconds_of_stages
from shardwright.profile import Profile


def chain_of_blocks(num_blocks: int = 8) -> ModelGraph:
    """``embed``, ``h.0`` .. ``h.7``, ``head``, and a loss."""
    builder = GraphBuilder()
    value = None
    for name in ("embed", *(f"h.{block}" for block in range(num_blocks)), "head"):
        weight = builder.parameter(f"{name}.weight", 400)
        kind = name.partition(".")[0]
        value = builder.unit(name, [] if value is None else [value], parameters=[weight], cost_class=kind)
    assert value is not None
    return builder.graph(builder.op("cross_entropy", [value], output_bytes=4))


GRAPH = chain_of_blocks()
PLANNED = {"embed": 0.1, "h": 1.0, "head": 1.0}


def profile(**seconds: float) -> Profile:
    return profile_of({kind: (s, 2 * s) for kind, s in {**PLANNED, **seconds}.items()})


def plan(costs: Profile, *, previous: Plan | None = None, **settings: Any) -> Plan:
    return make_plan(
        {4: (GRAPH, costs)},
        cluster=machines(),
        config=Config.parse({"pipeline": "1f1b", **settings}),
        mesh=Mesh.of(world_size=2, pipeline=2),
        previous=previous,
    )


def test_the_unit_that_blocks_of_another_stage_do_not_explain_gets_the_excess() -> None:
    planned = plan(profile())
    took = seconds_of_stages(GRAPH, profile(embed=2.1), planned)
    factors = factors_of_units(GRAPH, profile(), planned, took)
    assert factors["h.0"] == factors["h.7"] == pytest.approx(1.0, rel=0.05)
    assert factors["embed"] > 5


def test_factors_give_the_seconds_that_were_measured() -> None:
    planned = plan(profile())
    took = seconds_of_stages(GRAPH, profile(h=1.1, head=4.0), planned)
    corrected = corrected_profile(profile(), GRAPH, factors_of_units(GRAPH, profile(), planned, took))
    found = seconds_of_stages(GRAPH, corrected, planned)
    assert found[1] / found[0] == pytest.approx(took[1] / took[0], rel=1e-3)
    assert sum(found) == pytest.approx(sum(seconds_of_stages(GRAPH, profile(), planned)), rel=1e-3)


def test_a_machine_that_is_slower_or_noisy_changes_nothing() -> None:
    planned = plan(profile())
    first, second = seconds_of_stages(GRAPH, profile(), planned)
    assert factors_of_units(GRAPH, profile(), planned, (2 * first, 2 * second)) == {}
    assert factors_of_units(GRAPH, profile(), planned, (1.08 * first, second)) == {}
    assert factors_of_units(GRAPH, profile(), planned, (first, 0.0)) == {}


def test_estimates_are_corrected_as_a_whole() -> None:
    planned = plan(profile())
    assert planned.prediction is not None
    guessed = planned.model_copy(
        update={"prediction": planned.prediction.model_copy(update={"provenance": "estimated"})}
    )
    first, second = seconds_of_stages(GRAPH, profile(), planned)
    factors = factors_of_units(GRAPH, profile(), guessed, (3 * first, 3 * second))
    assert all(factor == pytest.approx(3.0) for factor in factors.values())


def test_recomputed_units_and_operations_between_units_are_counted() -> None:
    planned = plan(profile(), activation_checkpointing="full")
    first, second = seconds_of_stages(GRAPH, profile(), planned)
    assert first + second == pytest.approx(4 * sum(PLANNED.values()) + 4 * 7 * PLANNED["h"])
    with_loss = Profile(costs={**profile().costs, "": profile_of({"": (5.0, 5.0)}).costs[""]})
    assert seconds_of_stages(GRAPH, with_loss, planned)[1] == pytest.approx(second + 10.0)


def test_the_next_plan_moves_the_cut_where_stages_took_other_times() -> None:
    """Costs that were wrong give an unbalanced plan; one run later it is balanced, and stays."""
    wrong, right = profile(head=0.5), profile(head=4.0)
    first = plan(wrong)
    factors = factors_of_units(GRAPH, wrong, first, seconds_of_stages(GRAPH, right, first))
    second = plan(corrected_profile(wrong, GRAPH, factors), previous=first)
    assert len(second.stages[1].units) < len(first.stages[1].units)
    assert [stage.units for stage in second.stages] == [stage.units for stage in plan(right).stages]
    assert second.schedule.microbatches == first.schedule.microbatches
    costs = corrected_profile(wrong, GRAPH, factors)
    again = factors_of_units(GRAPH, costs, second, seconds_of_stages(GRAPH, right, second))
    third = plan(corrected_profile(costs, GRAPH, again), previous=second)
    assert third.stages == second.stages


def test_a_small_gain_does_not_move_it() -> None:
    wrong, right = profile(head=0.9), profile(head=1.6)
    first = plan(wrong)
    factors = factors_of_units(GRAPH, wrong, first, seconds_of_stages(GRAPH, right, first))
    assert factors
    assert plan(corrected_profile(wrong, GRAPH, factors), previous=first).stages == first.stages

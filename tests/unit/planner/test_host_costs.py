"""What the library takes for a step, an action, a unit and an operation, in plans."""

from dataclasses import replace
from typing import Any

import pytest
from graphs import chain_graph, profile_of

from planner.machines import machines
from shardwright.cluster import Cluster, HostCosts
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.observe.plan_text import title_of
from shardwright.plan import Plan
from shardwright.planner import Candidates, best_of_meshes, make_plan
from shardwright.planner.waterfall import break_down

DEAR = HostCosts(step_s=5e-3, action_s=1e-3, unit_s=1e-4, operation_s=5e-5)
CHEAP = HostCosts(step_s=1e-3, action_s=1e-4)
BLOCKS, FREE = 6, 10


def candidates(*counts: int, seconds: float) -> Candidates:
    """Units of one batch take so many seconds, forward and backward."""
    cost = seconds / (BLOCKS + 2) / 3
    return {
        m: (
            replace(chain_graph(BLOCKS, output_bytes=4), free_operations=FREE),
            profile_of(dict.fromkeys(("embed", "block", "head"), (cost / m, 2 * cost / m))),
        )
        for m in counts
    }


def dear() -> Cluster:
    return replace(machines(), host_costs=DEAR, loop_costs=CHEAP)


def plan(options: Candidates, cluster: Cluster, mesh: Mesh | None = None, **config: Any) -> Plan:
    mesh = mesh or Mesh.of(world_size=2, pipeline=2)
    return make_plan(options, cluster=cluster, config=Config.parse(config), mesh=mesh)


def test_they_are_rows_of_the_waterfall() -> None:
    found = plan(candidates(4, seconds=1e-3), dear(), pipeline="1f1b")
    assert found.prediction is not None
    waterfall = break_down(found)
    parts = {part.name: part.seconds for part in waterfall.parts}
    graph, _ = candidates(4, seconds=1e-3)[4]
    script_s = (BLOCKS + 2) * DEAR.unit_s + graph.operations * DEAR.operation_s
    assert parts["runtime per action"] == pytest.approx(4 * 2 * DEAR.action_s)
    assert parts["runtime per unit and operation"] == pytest.approx(4 * script_s)
    assert parts["before and after the schedule"] == pytest.approx(DEAR.step_s)
    assert "not explained" not in parts
    assert sum(parts.values()) == pytest.approx(found.prediction.step_s)


@pytest.mark.parametrize("kind", ["interleaved_1f1b", "zb_v"])
def test_a_rank_runs_the_step_function_once_for_a_microbatch(kind: str) -> None:
    """However many stages it has."""
    found = plan(candidates(4, seconds=1e-3), dear(), pipeline=kind)
    assert len(found.stages) > 2 == found.mesh.pipeline
    parts = {part.name: part.seconds for part in break_down(found).parts}
    one = plan(candidates(4, seconds=1e-3), dear(), pipeline="1f1b")
    usual = {part.name: part.seconds for part in break_down(one).parts}
    name = "runtime per unit and operation"
    assert parts[name] == pytest.approx(usual[name])


def test_the_first_line_tells_what_is_faster() -> None:
    """Two ranks took 49 ms a step where one took 6.6 ms: the planner took the library for free."""
    title = title_of(plan(candidates(4, seconds=5e-3), dear()))
    assert "one process alone is faster: 6.80 ms" in title  # 5 ms, 8 actions, a step
    assert "2 replicas are faster: 3." in title
    title = title_of(plan(candidates(4, seconds=1.0), dear()))
    assert "one process alone" not in title


@pytest.mark.parametrize(
    ("pipelined", "whole", "degree"), [(DEAR, CHEAP, 1), (CHEAP, replace(DEAR, step_s=2e-2), 2)]
)
def test_free_degrees_are_chosen_with_them(pipelined: HostCosts, whole: HostCosts, degree: int) -> None:
    cluster = replace(machines(), host_costs=pipelined, loop_costs=whole)
    grids = [Mesh.of(world_size=2, pipeline=p, data=2 // p) for p in (1, 2)]
    options = candidates(1, 2, 4, seconds=5e-3)
    found = best_of_meshes(grids, lambda mesh: plan(options, cluster, mesh))
    assert found.mesh.pipeline == degree

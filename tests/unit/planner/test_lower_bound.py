"""No schedule is faster than the bound, and the search finds the same with it."""

from typing import Any

import pytest
from graphs import chain_graph, profile_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from planner.machines import machines
from planner.test_tables import PROFILE, graphs
from shardwright.config import Config
from shardwright.costs.calibration import ACTION_S
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner import build_chain, make_plan
from shardwright.planner.draft import Draft, make_draft
from shardwright.planner.fabric import Fabric
from shardwright.planner.workload import Demands, Workload
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

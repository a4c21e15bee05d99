"""Plans: pins, limits, optimality on small models, reasons, refusals."""

import itertools
from dataclasses import replace
from typing import Any

import pytest
from graphs import GraphBuilder, chain_graph, profile_of
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.machines import machines
from shardwright.cluster import Cluster, Link
from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.mesh import Mesh
from shardwright.plan import Plan
from shardwright.planner import (
    Candidates,
    build_chain,
    draft,
    make_plan,
    microbatch_counts,
)
from shardwright.planner.draft import make_draft
from shardwright.planner.fabric import Fabric
from shardwright.planner.objective import Demands
from shardwright.planner.workload import Workload
from shardwright.schedule import Schedule, Simulation, simulate

BLOCKS = 6


def candidates(*counts: int, blocks: int = BLOCKS, tied: bool = False, saved_bytes: int = 8000) -> Candidates:
    """One model traced at several microbatch sizes: time and memory shrink in proportion."""
    return {
        m: (
            chain_graph(blocks, tied=tied, output_bytes=800 // m // 4 * 4),
            profile_of(
                {"embed": (0.4 / m, 0.8 / m), "block": (0.8 / m, 1.6 / m), "head": (0.8 / m, 1.6 / m)},
                saved_bytes=saved_bytes / m,
                input_bytes=400 / m,
            ),
        )
        for m in counts
    }


def plan(
    options: Candidates,
    ranks: int,
    *,
    replicas: int = 1,
    cluster: Cluster | None = None,
    placement: dict[str, int] | None = None,
    **config: Any,
) -> Plan:
    return make_plan(
        options,
        cluster=cluster or machines(),
        config=Config.parse(config),
        mesh=Mesh.of(world_size=ranks * replicas, pipeline=ranks, data=replicas),
        placement=placement,
    )


def units(found: Plan) -> list[tuple[str, ...]]:
    return [stage.units for stage in found.stages]


def test_two_ranks_share_the_work() -> None:
    found = plan(candidates(4), 2, pipeline="1f1b")
    assert units(found) == [("embed", "h.0", "h.1", "h.2"), ("h.3", "h.4", "h.5", "head")]
    assert found.stage_ranks == (0, 1)
    assert (found.schedule.kind, found.schedule.microbatches) == ("1f1b", 4)
    assert found.prediction is not None
    assert found.prediction.provenance == "measured"
    # 8.4 s and 9.6 s of work for a batch; the last rank starts when the first forward has passed.
    assert found.prediction.step_s == pytest.approx(9.6 + 8.4 / 4, rel=0.01)
    assert found.pins == {"pipeline": "1f1b"}
    assert Plan.parse(found.to_json()) == found


def test_one_rank_takes_one_microbatch_where_nothing_is_gained_by_more() -> None:
    found = plan(candidates(1, 2, 4), 1)
    assert (found.schedule.kind, found.schedule.microbatches) == ("1f1b", 1)
    assert len(found.stages) == 1


@pytest.mark.parametrize(
    ("pins", "kind", "stages"),
    [
        ({"pipeline": "simple"}, "gpipe", 2),
        ({"pipeline": "interleaved"}, "1f1b", 2),
        ({"pipeline": "zb_h1"}, "zb_h1", 2),
        ({"pipeline": "zb_v"}, "zb_v", 4),
        ({"pipeline": "interleaved_1f1b", "virtual_stages": 3}, "interleaved_1f1b", 6),
        ({"virtual_stages": 4}, "interleaved_1f1b", 8),
    ],
)
def test_pins_are_kept(pins: dict[str, Any], kind: str, stages: int) -> None:
    found = plan(candidates(4, 8), 2, microbatches=4, **pins)
    assert (found.schedule.kind, len(found.stages), found.schedule.microbatches) == (kind, stages, 4)
    assert found.pins["microbatches"] == 4
    assert any("Fixed by the settings: microbatches 4" in reason for reason in found.why)


@given(
    costs=st.lists(st.floats(0.1, 3), min_size=3, max_size=6),
    pipeline=st.integers(2, 3),
    kind=st.sampled_from(["1f1b", "gpipe", "zb_h1"]),
)
@example(costs=[1.25, 0.5, 1.25, 2.5], pipeline=3, kind="1f1b")  # moving single cuts ended at 1.056 of it
@settings(max_examples=25)
def test_the_best_of_all_partitions_of_a_small_model(costs: list[float], pipeline: int, kind: str) -> None:
    classes = {f"c{i}": (cost, 2 * cost) for i, cost in enumerate(costs)}
    graph = chain_graph(len(costs), classes=list(classes))
    profile = profile_of({**classes, "embed": (0.1, 0.2), "head": (0.5, 1.0)})
    found = plan({4: (graph, profile)}, pipeline, pipeline=kind)
    fabric = Fabric(machines(), Mesh.of(world_size=pipeline, pipeline=pipeline))
    workload = Workload(build_chain(graph, profile), num_microbatches=4, fabric=fabric, demands=Demands())
    num_calls = len(costs) + 2
    best = min(
        make_draft(workload, kind, tuple(range(pipeline)), cuts=(0, *inner, num_calls)).work_out().step_s
        for inner in itertools.combinations(range(1, num_calls), pipeline - 1)
    )
    assert found.prediction is not None
    assert found.prediction.step_s <= best * 1.01  # near ties go to the simplest


def test_transfers_decide_between_equal_splits() -> None:
    builder = GraphBuilder()
    value = builder.unit("a", output_bytes=4000)
    value = builder.unit("b", [value], output_bytes=4)
    value = builder.unit("c", [value], output_bytes=4000)
    graph = builder.graph(loss=builder.op("loss", [builder.unit("d", [value])]))
    found = plan({4: (graph, profile_of())}, 2, cluster=machines(intra=(0, 1e4)), pipeline="1f1b")
    assert units(found) == [("a", "b"), ("c", "d")]


def test_recomputation_only_where_memory_requires_it() -> None:
    roomy = plan(candidates(4), 2, memory_limit="1GiB")
    assert not any(stage.recompute for stage in roomy.stages)
    tight = plan(candidates(4), 2, pipeline="1f1b", memory_limit=4 * 4 * 400 + 14_000)
    assert any(stage.recompute for stage in tight.stages)
    assert any("recomputed in the backward" in reason for reason in tight.why)
    assert tight.prediction is not None
    assert max(memory.peak_bytes for memory in tight.prediction.memory) <= 4 * 4 * 400 + 14_000


def test_memory_weight_evens_out_memory() -> None:
    builder = GraphBuilder()
    big = builder.parameter("big", 40_000)
    value = builder.unit("a", parameters=[big], cost_class="embed")
    for index in range(5):
        weight = builder.parameter(f"w{index}", 10_000)
        value = builder.unit(f"b{index}", [value], parameters=[weight])
    graph = builder.graph(loss=builder.op("loss", [value]))
    options = {4: (graph, profile_of({"embed": (0.1, 0.1), "block": (1.0, 2.0)}))}
    fast = plan(options, 2, pipeline="1f1b")
    lean = plan(options, 2, pipeline="1f1b", optimize="memory")
    assert len(units(lean)[0]) < len(units(fast)[0])
    assert fast.prediction is not None
    assert lean.prediction is not None
    assert max(m.peak_bytes for m in lean.prediction.memory) < max(
        m.peak_bytes for m in fast.prediction.memory
    )


def test_ties_are_replicated_or_kept_together() -> None:
    found = plan(candidates(4, tied=True), 2, pipeline="1f1b")
    assert found.replicated == {"embed.weight": (0, 1)}
    assert any("embed.weight is held by ranks 0, 1: summing the gradients takes" in why for why in found.why)
    together = plan(candidates(4, tied=True), 2, pipeline="zb_v")
    assert together.replicated == {}
    assert any("embed.weight is used by several units, all on rank 0." in why for why in together.why)


def test_replicas_add_the_sum_of_gradients() -> None:
    one = plan(candidates(4), 2, pipeline="1f1b")
    two = plan(candidates(4), 2, replicas=2, pipeline="1f1b", cluster=machines(intra=(0.0, 1e4)))
    assert one.prediction is not None
    assert two.prediction is not None
    assert two.mesh.grid.world_size == 4
    assert any("Summing the gradients over 2 replicas takes 160 ms a step." in why for why in two.why)


def test_alternatives_say_what_they_cost() -> None:
    found = plan(candidates(2, 4), 4)
    assert 1 <= len(found.alternatives) <= 5
    rows = {(a.schedule, a.microbatches, a.stages) for a in found.alternatives}
    assert len(rows) == len(found.alternatives)
    chosen = (found.schedule.kind, found.schedule.microbatches, len(found.stages))
    assert chosen not in rows
    assert all("%" in a.verdict or "does not fit" in a.verdict for a in found.alternatives)


def by_hand(placement: dict[str, int], **config: Any) -> Plan:
    pins = {"auto_partition": False, "default_partition": 0, "pipeline": "1f1b", **config}
    return plan(candidates(4, blocks=2), 2, placement=placement, **pins)


@pytest.mark.parametrize(
    ("placement", "text"),
    [
        ({"h.0": 2}, "a module is placed on partition 2, but there are 2: partitions run from 0 to 1."),
        ({}, "partition 1 gets no module."),
    ],
)
def test_manual_placement_that_cannot_be(placement: dict[str, int], text: str) -> None:
    with pytest.raises(PlanError) as caught:
        by_hand(placement)
    assert str(caught.value).startswith(text)


def test_units_that_must_stay_together_are_counted_once() -> None:
    builder = GraphBuilder()
    value = builder.unit("norm", mutates_buffers=True)
    value = builder.unit("norm", [builder.unit("a", [value])], mutates_buffers=True)
    with pytest.raises(
        PlanError,
        match=r"1 units to place \(3 unit calls, .* share a stage: norm to norm#1 for the unit norm",
    ):
        plan({1: (builder.graph(loss=value), profile_of())}, 2)


def test_infeasible_says_what_is_missing_and_what_would_help() -> None:
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(candidates(4), 2, memory_limit=13_200, activation_checkpointing="none")
    first, heading, *remedies = str(caught.value).splitlines()
    assert first.startswith("nothing fits in 12.9 KiB a rank. The closest of ")
    assert "too much: " in first
    assert " on rank " in first
    assert "activations" in first
    assert heading.strip() == "What would help:"
    text = "\n".join(remedies)
    assert "set activation_checkpointing to" in text
    assert "set microbatches to " in text
    assert "set pipeline_parallel_degree to " in text
    assert "More memory: " in text


def test_infeasible_names_offload_where_it_would_do() -> None:
    options, pins = candidates(4, blocks=24), {"activation_checkpointing": "none", "pipeline": "1f1b"}
    pins |= {
        "activation_loading_horizon": 1,
        "cluster": replace(machines(), host=Link(latency_s=0.0, bandwidth_Bps=1e9)),
    }
    free = plan(options, 2, **pins)
    assert free.prediction is not None
    pins["memory_limit"] = int(0.7 * max(each.peak_bytes for each in free.prediction.memory))
    with pytest.raises(InfeasiblePlanError, match='set offload_activations to "auto"'):
        plan(options, 2, **pins)
    assert any(stage.offload for stage in plan(options, 2, **pins, offload_activations="auto").stages)
    pins["memory_limit"] = 1000
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(options, 2, **pins)
    assert "offload" not in str(caught.value)


@pytest.mark.parametrize("remedy", ["microbatches", "pipeline_parallel_degree", "memory"])
def test_remedies_work(remedy: str) -> None:
    pins = {"memory_limit": 13_200, "activation_checkpointing": "none", "pipeline": "1f1b"}
    with pytest.raises(InfeasiblePlanError) as caught:
        plan(candidates(4), 2, **pins)
    lines = [line for line in str(caught.value).splitlines() if remedy in line]
    if remedy == "memory":
        pins["memory_limit"] = 2 * 13_200
        plan(candidates(4), 2, **pins)
        return
    number = int(lines[-1].split("to ")[1].split()[0])
    if remedy == "microbatches":
        plan(candidates(number), 2, **pins)
    else:
        plan(candidates(4), number, **pins)


@pytest.mark.parametrize(
    ("batch_size", "pipeline", "counts"),
    [
        (32, 4, (4, 8, 16, 32)),
        (32, 1, (1, 2, 4, 8)),
        (6, 2, (2, 3, 6)),
        (7, 2, (2, 4, 7)),
        (1, 4, (1,)),
        (3, 8, (3,)),
    ],
)
def test_microbatch_counts(batch_size: int, pipeline: int, counts: tuple[int, ...]) -> None:
    assert microbatch_counts(batch_size, config=Config(), pipeline=pipeline) == counts


def test_pinned_microbatch_count() -> None:
    config = Config.parse({"microbatches": 3})
    assert microbatch_counts(8, config=config, pipeline=2) == (3,)
    with pytest.raises(
        PlanError,
        match=r"a batch of a replica has 2 samples, but microbatches is 3: each needs at least one sample\. "
        r"Use batches of 3 or more, or set microbatches to at most 2\.$",
    ):
        microbatch_counts(2, config=config, pipeline=2)
    with pytest.raises(PlanError, match=r"has 1 sample, but .* set microbatches to 1\.$"):
        microbatch_counts(1, config=config, pipeline=2)


def test_fifty_units_need_less_than_two_hundred_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted, since seconds depend on the machine: those are in ``benchmarks/planning.py``."""
    sizes: list[int] = []

    def counted(schedule: Schedule, *args: Any, **options: Any) -> Simulation:
        sizes.append(sum(map(len, schedule.actions)))
        return simulate(schedule, *args, **options)

    monkeypatch.setattr(draft, "simulate", counted)
    plan(candidates(4, 8, 16, blocks=48), 4)
    assert 12 < len(sizes) < 200
    assert sum(sizes) < 100_000

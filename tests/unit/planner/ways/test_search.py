"""The search finds the best of all ways, and goes the way that machines do."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from planner.machines import all_ways

from shardwright.catalogue import Transformer, find_architecture
from shardwright.cluster import parse_inventory
from shardwright.costs import Offload, Options, Placement, Recompute, ScheduleKind
from shardwright.errors import ConfigError, InfeasiblePlanError
from shardwright.planner.ways import Task, search, way_of
from shardwright.planner.ways.answers import why_not
from shardwright.planner.ways.way import fits, prices_of, with_least_recomputation

TIE = 1.05 * (1 + 1e-9)


def small_model(layers=6, experts=1):
    return Transformer(
        name="small",
        layers=layers,
        hidden=2048,
        heads=4,
        vocabulary=32000,
        sequence=512,
        ffn=8192,
        experts=experts,
        experts_per_token=min(2, experts),
    )


def machines(nodes=1, per_node=4, memory=8 * 2**30, **rates):
    kind, _ = parse_inventory("p4d.24xlarge").nodes[0]
    device = replace(kind.accelerator, memory_bytes=memory)
    kind = replace(kind, num_accelerators=per_node, accelerator=device, **rates)
    return replace(parse_inventory("p4d.24xlarge"), nodes=((kind, nodes),))


def every_way(task):
    """Told apart by plain loops, with all that the search leaves out."""
    model, ranks = task.model, task.machines.num_ranks
    per_node = task.machines.nodes[0][0].num_accelerators
    some = range(1, ranks + 1)
    for t, p, c, d in product(some, some, some, some):
        if t * p * c * d != ranks or model.heads % t or per_node % t or p > model.layers or task.batch % d:
            continue
        if c > 1 and (model.sequence % (2 * c) or c & (c - 1)):
            continue
        each = task.batch // d
        kinds = [(ScheduleKind.ONE_F_ONE_B, 1)]
        if p > 1:
            kinds += [(ScheduleKind.ZB_H1, 1), (ScheduleKind.GPIPE, 1)]
            kinds += [(ScheduleKind.INTERLEAVED, v) for v in range(2, min(8, (model.layers + 2) // p) + 1)]
            kinds += [(ScheduleKind.ZB_V, 2)] * ((model.layers + 2) // p >= 2)
        shards = [(1, 0)] + [(s, z) for s in some if s > 1 and (d * c) % s == 0 for z in (1, 2, 3)]
        experts = [e for e in range(1, model.experts + 1) if model.experts % e == 0 and (d * c) % e == 0]
        again = [(r, 0) for r in Recompute] + [(Recompute.FULL, k) for k in range(1, model.layers // p)]
        shards = [(s, z, h) for s, z in shards for h in ((0, 1) if z > 1 else (1,))]
        for b, (kind, v), (s, z, h), e, (r, k), o in product(
            range(1, 65), kinds, shards, experts, again, Offload
        ):
            if each % b or (kind == ScheduleKind.INTERLEAVED and (each // b) % p):
                continue
            yield Options(
                tensor=t,
                pipeline=p,
                virtual=v,
                data=d,
                shard=s,
                sharded=int(z),
                context=c,
                expert=e,
                microbatch=b,
                microbatches=each // b,
                schedule=int(kind),
                recompute=int(r),
                kept_layers=k,
                hierarchical=h,
                offload=int(o),
                sequence_parallel=int(t > 1),
            )


@pytest.mark.thorough
@given(
    nodes=st.sampled_from([1, 2]),
    per_node=st.sampled_from([1, 2]),
    batch=st.sampled_from([1, 2, 4]),
    layers=st.integers(1, 5),
    experts=st.sampled_from([1, 2]),
    memory=st.sampled_from([4, 8, 40]),
)
@settings(deadline=None, max_examples=12)
def test_nothing_is_better_than_what_is_found(nodes, per_node, batch, layers, experts, memory):
    task = Task(
        model=small_model(layers, experts), machines=machines(nodes, per_node, memory * 2**30), batch=batch
    )
    ways = [way_of(task, options) for options in every_way(task)]
    fitting = [way.step_s for way in ways if way.peak_bytes <= task.memory_bytes]
    try:
        best = search(task).best
    except InfeasiblePlanError:
        assert not fitting
        return
    assert best.peak_bytes <= task.memory_bytes
    assert min(fitting) * (1 - 1e-9) <= best.step_s <= min(fitting) * TIE


@given(memory=st.integers(6, 40), batch=st.sampled_from([8, 64]), nodes=st.sampled_from([1, 2]))
@settings(deadline=None, max_examples=25)
def test_no_more_layers_are_recomputed_than_memory_requires(memory, batch, nodes):
    task = Task(model=small_model(24), machines=machines(nodes, memory=memory * 2**30), batch=batch)
    ways = all_ways(replace(task, pins={"recompute": 2}))
    fitting = ways.take(np.flatnonzero(fits(task, ways)))
    found = with_least_recomputation(task, fitting)
    assert fits(task, found).all()
    assert (
        prices_of(task, found).seconds.total <= prices_of(task, fitting).seconds.total * (1 + 1e-12)
    ).all()
    # One block more is too much, unless another rank becomes the neediest in between.
    may = (found.kept_layers + 1 <= 24 / found.pipeline) & (found.pipeline == 1) & (found.offload == 0)
    more = replace(found, kept_layers=found.kept_layers + 1).take(np.flatnonzero(may))
    assert not fits(task, more).any()


def test_cpus_offload_nothing():
    task = Task(
        model=find_architecture("gpt2-1.5b"),
        machines=parse_inventory("this-cpu*16"),
        batch=16,
        dtype="float32",
    )
    assert set(all_ways(task).offload) == {0}
    with pytest.raises(ConfigError, match="offload is 1, but this-cpu x 16 computes where its memory is"):
        search(replace(task, pins={"offload": 1}))


def test_what_the_runtime_does_not_share_is_said_and_has_no_settings():
    task = Task(model=find_architecture("llama3-8b"), machines=parse_inventory("dgx-a100-80gb"), batch=64)
    pins = {"tensor": 1, "pipeline": 1, "context": 1}
    gradients = search(replace(task, pins=pins | {"sharded": 2, "shard": 8})).best
    assert gradients.not_run_yet == ["ZeRO-2 over 8 of 8 ranks"]
    assert gradients.settings == {}
    part = search(replace(task, pins=pins | {"sharded": 1, "shard": 2, "recompute": 2})).best
    assert part.settings["shard_optimizer_state"] == 2
    only = all_ways(replace(task, pins=pins, only_what_runs=True))
    assert set(only.sharded) == {0, 1, 3}
    assert set(only.shard[only.sharded == 1]) == {2, 4, 8}
    with pytest.raises(ConfigError, match="the dtype"):
        search(replace(task, pins={"width": 4}))


def test_too_little_memory_of_hosts_is_told():
    kind, _ = parse_inventory("p4d.24xlarge").nodes[0]
    machines = replace(parse_inventory("p4d.24xlarge"), nodes=((replace(kind, memory_bytes=8 * 2**30), 1),))
    task = Task(model=find_architecture("gpt2-1.5b"), machines=machines, batch=64)
    with pytest.raises(InfeasiblePlanError, match="what it offloads is more than the 819"):
        search(replace(task, pins={"offload": 1}))


def test_the_faster_way_to_gather_is_taken_and_told():
    task = Task(model=find_architecture("llama3-8b"), machines=parse_inventory("dgx-a100-80gb*4"), batch=64)
    pins = {"sharded": 3, "pipeline": 1, "tensor": 1, "context": 1}
    free, flat, by_nodes = (
        search(replace(task, pins=pins | more)).best
        for more in ({}, {"hierarchical": 0}, {"hierarchical": 1})
    )
    assert free.step_s == min(flat.step_s, by_nodes.step_s) < max(flat.step_s, by_nodes.step_s)
    assert free.options.hierarchical in (0, 1)
    assert "gathers in one ring" in flat.title
    assert "gathers in one ring" not in by_nodes.title


def test_parts_add_up():
    best = search(
        Task(model=find_architecture("gpt-neox-20b"), machines=machines(8, 8, 40 * 2**30), batch=512)
    ).best
    assert sum(seconds for _, seconds in best.waterfall) == pytest.approx(best.step_s)
    assert sum(best.num_bytes.values()) == best.peak_bytes
    low, high = best.interval_s
    assert low < best.step_s < high


def test_layers_and_sequences_are_divided_by_settings():
    task = Task(model=find_architecture("llama3-8b"), machines=parse_inventory("dgx-a100-80gb*2"), batch=64)
    layers = search(replace(task, only_what_runs=True, pins={"tensor": 4})).best
    assert layers.not_run_yet == []
    assert layers.settings["tensor_parallel_degree"] == 4
    assert layers.settings["sequence_parallel"]
    sequences = search(replace(task, only_what_runs=True, pins={"context": 2})).best
    assert sequences.settings["context_parallel_degree"] == 2
    assert "tensor_parallel_degree" not in sequences.settings
    both = search(replace(task, only_what_runs=True, pins={"tensor": 2, "context": 2})).best
    assert both.not_run_yet == []
    degrees = (both.settings[f"{name}_parallel_degree"] for name in ("tensor", "context"))
    assert [*degrees, both.settings["sequence_parallel"]] == [2, 2, True]


def test_experts_are_shared_by_the_ranks_of_a_batch():
    """Priced among replicas; as many ranks share a batch with the samples of all of them."""
    task = Task(model=find_architecture("mixtral-8x7b"), machines=parse_inventory("p5.48xlarge*4"), batch=64)
    pins = {"expert": 4, "tensor": 2, "data": 8, "pipeline": 2, "sharded": 0}
    way = search(replace(task, only_what_runs=True, pins=pins)).best
    assert way.not_run_yet == []
    degrees = {name: way.settings[f"{name}_parallel_degree"] for name in ("expert", "tensor", "data")}
    assert degrees == {"expert": 4, "tensor": 2, "data": 2}
    sharded = search(replace(task, only_what_runs=True, pins={**pins, "sharded": 3, "shard": 2})).best
    assert sharded.settings["sharded_data_parallel_degree"] == 2
    # Replicas of the same experts divide all states, those of experts too.
    assert sharded.num_bytes["optimizer"] == pytest.approx(way.num_bytes["optimizer"] / 2, rel=1e-3)
    for more, beside in (
        ({"sharded": 3, "shard": 8}, "ZeRO-3"),
        ({"tensor": 4, "data": 4}, "tensor 4, context 1 and data 4"),
        ({"context": 2, "data": 4}, "tensor 2, context 2 and data 4"),
    ):
        others = replace(task, pins={**pins, **more})
        assert f"experts over 4 ranks in a way with {beside}" in search(others).best.not_run_yet
        with pytest.raises(ConfigError, match="this version runs no way with expert=4"):
            search(replace(others, only_what_runs=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"pins": {"tensor": 3}},
            "no way to train has tensor=3: small has 6 layers and 4 heads, the machines 8",
        ),
        ({"pins": {"pipeline": 8}}, "has pipeline=8"),
        ({"pins": {"tensor": 4, "pipeline": 4}}, "has tensor=4 and pipeline=4"),
        ({"pins": {"data": 4, "microbatches": 5}}, "microbatches=5"),
        ({"pins": {"tensors": 4}}, "'tensors' is no option of a topology"),
        ({"pins": {"tensor": 0}}, "tensor is 0, but it must be at least 1"),
        ({"pins": {"expert": 2}}, "no way to train has expert=2"),
        ({"batch": 0}, "batch is 0, but it must be from 1 to"),
        ({"batch": 10**12}, "batch is 1000000000000"),
        ({"sequence": -5}, "sequence is -5"),
        ({"dtype": "int3"}, "A100-40GB has no rate for 'int3'; take one of float32"),
    ],
)
def test_what_cannot_be(change, message):
    with pytest.raises(ConfigError, match=message):
        search(replace(Task(model=small_model(), machines=machines(2), batch=8), **change))


def test_a_million_ranks_are_too_many():
    with pytest.raises(ConfigError, match="the number of ranks is 1600000"):
        Task(model=small_model(), machines=machines(200_000, 8), batch=8)


def test_what_does_not_fit_says_what_would_help():
    task = Task(model=find_architecture("gpt3-175b"), machines=parse_inventory("p4d.24xlarge"), batch=64)
    with pytest.raises(InfeasiblePlanError, match=r"nothing of \d+ ways fits in 35\.7 GiB a rank") as raised:
        search(replace(task, pins={"recompute": 0}))
    text = str(raised.value)
    assert "More machines: " in text
    assert "Larger accelerators: " in text
    nodes = int(text.split("More machines: ")[1].split()[0])
    for number, is_enough in ((nodes, True), (nodes // 4, False)):
        there = replace(
            task, machines=parse_inventory(f"p4d.24xlarge*{max(1, number)}"), pins={"recompute": 0}
        )
        if is_enough:
            assert search(there).best.peak_bytes <= there.memory_bytes
        else:
            with pytest.raises(InfeasiblePlanError):
                search(there)


def test_pipelines_stay_inside_of_nodes_where_networks_are_slow():
    machines = parse_inventory("p3.16xlarge*4")
    task = Task(
        model=find_architecture("gpt2-1.5b"),
        machines=machines,
        batch=256,
        dtype="float16",
        pins={"pipeline": 8, "tensor": 1, "sharded": 0, "microbatch": 1, "context": 1},
    )
    best = {name: search(replace(task, pins=task.pins | {"placement": name})).best for name in Placement}
    hops = {name: way.seconds["point_to_point"] for name, way in best.items()}
    sums = {name: way.seconds["all_reduce"] for name, way in best.items()}
    assert hops[Placement.DPT] < hops[Placement.PDT]
    assert sums[Placement.DPT] > sums[Placement.PDT]
    chosen = search(task).best
    assert chosen.step_s == min(way.step_s for way in best.values())
    assert chosen.settings["placement_strategy"] == Placement(int(chosen.options.placement)).name
    one_node = search(replace(task, machines=parse_inventory("p3.16xlarge"))).best
    assert one_node.options.placement == Placement.PDT


def test_near_ties_go_by_risk():
    # 2.2 % faster than what is chosen: TP2 CP2 PP8 DP4 with the optimizer on the host and 99 % of the memory.
    task = Task(model=find_architecture("llama3-70b"), machines=parse_inventory("p5.48xlarge*16"), batch=1024)
    best = search(task).best
    ways = all_ways(task)
    fastest = np.asarray(prices_of(task, ways.take(np.flatnonzero(fits(task, ways)))).seconds.total).min()
    assert best.options.offload == Offload.NOTHING
    assert best.peak_bytes <= 0.9 * best.limit_bytes
    assert fastest < best.step_s <= fastest * TIE


def test_model_flops_are_those_of_the_literature():
    # Narayanan et al. 2021, equation 3, without recomputation, for GPT-3 175B.
    model, batch = find_architecture("gpt3-175b"), 8
    task = Task(model=model, machines=parse_inventory("dgx-a100-80gb*16"), batch=batch)
    s, h = model.sequence, model.hidden
    blocks = 72 * batch * s * model.layers * h**2 * (1 + s / (6 * h))
    assert task.flops == pytest.approx(blocks + 6 * batch * s * h * model.vocabulary, rel=1e-9)


def test_why_not():
    task = Task(
        model=find_architecture("gpt-neox-20b"), machines=parse_inventory("p4d.24xlarge*4"), batch=512
    )
    slower = "\n".join(why_not(task, {"tensor": 8, "pipeline": 4}).sentences)
    assert "The best with tensor=8, pipeline=4: tensor 8, pipeline 4" in slower
    assert "Where it differs: tensor parallel collectives +" in slower
    larger = "\n".join(why_not(task, {"pipeline": 1, "tensor": 1, "sharded": 0}).sentences)
    assert "nothing fits" in larger
    assert "too much" in larger


def test_experts_of_replicas_over_nodes_exchange_over_the_network():
    """With DPT, pipelines lie inside of nodes, and those that share experts over them."""
    task = Task(
        model=find_architecture("mixtral-8x7b"), machines=parse_inventory("dgx-h100*4@25Gbit"), batch=512
    )
    pins = {"context": 4, "expert": 8, "pipeline": 2, "data": 4, "sharded": 0, "recompute": 2}
    inside, over = (
        search(replace(task, pins={**pins, "placement": place})).best.seconds["expert"] for place in (0, 1)
    )
    assert over > 20 * inside


def test_shards_of_those_that_share_a_sequence_stay_in_their_node():
    task = Task(model=find_architecture("llama3-8b"), machines=parse_inventory("dgx-h100@10Gbit"), batch=8)
    way = search(replace(task, pins={"context": 8, "sharded": 3, "shard": 8, "pipeline": 1})).best
    assert way.seconds["gather"] + way.seconds["reduce_scatter"] < 2


@pytest.mark.parametrize("objective", ["speed", "memory"])
def test_the_bound_leaves_nothing_out(objective):
    """All ways priced, beside those that the bound leaves, with pins of each kind."""
    model, there = find_architecture("gpt2-1.5b"), parse_inventory("p4d.24xlarge")
    for pins in (
        {},
        {"context": 2, "sharded": 3},
        {"flash": 0, "kept_layers": 3},
        {"offload": 2, "tensor": 1},
        {"schedule": int(ScheduleKind.INTERLEAVED)},
    ):
        task = Task(model=model, machines=there, batch=32, pins=pins)
        ways = all_ways(task)
        ways = ways.take(np.flatnonzero(fits(task, ways)))
        if objective == "speed":
            ways = with_least_recomputation(task, ways)
        prices, best = prices_of(task, ways), search(task, objective=objective).best
        if objective == "speed":
            least, found = float(np.min(prices.seconds.total)), best.step_s
        else:
            least, found = float(np.min(prices.num_bytes.total)), best.peak_bytes
        assert least * (1 - 1e-6) <= found <= least * TIE


def test_what_this_version_does_not_run_is_said_of_what_was_asked():
    task = Task(model=find_architecture("llama3-8b"), machines=parse_inventory("dgx-h100*2"), batch=64)
    assert "ZeRO-2" in why_not(replace(task, only_what_runs=True), {"sharded": 2}).sentences[-1]
    with pytest.raises(ConfigError, match=r"this version runs no way with sharded=gradients\. Unpin"):
        search(replace(task, only_what_runs=True, pins={"sharded": 2}))


def test_remedies_stay_below_the_most_ranks():
    pins = {"tensor": 1, "pipeline": 1, "sharded": 0, "context": 1}
    machines = parse_inventory("rtx4090x4*10000")
    task = Task(model=find_architecture("llama3-405b"), machines=machines, batch=40000, pins=pins)
    with pytest.raises(InfeasiblePlanError, match="What would help"):
        search(task)

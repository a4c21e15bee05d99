"""Links, cores and sums of gradients, as one pipeline sees the machines.

Hosts that compute at different rates: slower ones get less to do.
"""

from dataclasses import replace

import pytest
from graphs import chain_graph, profile_of

from planner.machines import machines
from shardwright.config import Config
from shardwright.mesh import Mesh
from shardwright.planner import make_plan
from shardwright.planner.drafts import Sharing
from shardwright.planner.fabric import Fabric
from shardwright.planner.layout import Layout
from shardwright.planner.model_chain import build_chain


def layout(cuts: tuple[int, ...], ranks: tuple[int, ...], *, tied: bool) -> Layout:
    chain = build_chain(chain_graph(2, tied=tied), profile_of())
    return Layout(chain=chain, cuts=cuts, ranks=ranks, recompute=chain.column("forward_s") < 0)


def test_links_follow_the_placement() -> None:
    cluster = machines(ranks_per_node=2)
    near = Fabric(cluster, Mesh.of(world_size=4, pipeline=2, data=2, placement="cluster"))
    far = Fabric(cluster, Mesh.of(world_size=4, pipeline=2, data=2, placement="spread"))
    assert near.neighbour_link == cluster.intra_node
    assert far.neighbour_link == cluster.inter_node
    assert (near.ranks_per_node, far.ranks_per_node) == (2, 1)
    assert Fabric(cluster, Mesh.of(world_size=1)).neighbour_link is None


def test_all_reduce_is_a_ring() -> None:
    fabric = Fabric(
        machines(ranks_per_node=2, intra=(0, 100), inter=(0, 10)), Mesh.of(world_size=4, pipeline=4)
    )
    assert fabric.all_reduce_seconds(100, [0, 1]) == pytest.approx(1.0)
    assert fabric.all_reduce_seconds(100, [0, 1, 2, 3]) == pytest.approx(15.0)
    assert fabric.all_reduce_seconds(100, [2]) == 0.0
    assert fabric.all_reduce_seconds(0, [0, 1]) == 0.0


def test_ties_cost_only_between_ranks() -> None:
    fabric = Fabric(machines(intra=(0, 100)), Mesh.of(world_size=2, pipeline=2))
    assert fabric.tie_seconds(layout((0, 2, 4), (0, 1), tied=True)) == pytest.approx(4.0)
    assert fabric.tie_seconds(layout((0, 2, 4), (0, 1), tied=False)) == 0.0
    # First and last stage on one rank, as in a V: nothing to sum.
    assert fabric.tie_seconds(layout((0, 1, 3, 4), (0, 1, 0), tied=True)) == 0.0


@pytest.mark.parametrize("data", [1, 2, 4])
@pytest.mark.parametrize(("cores", "crowd"), [(0, 1), (1, 4), (2, 2), (3, 4 / 3), (4, 1), (8, 1)])
def test_ranks_that_share_a_core_wait_for_the_overhead_of_one_another(
    cores: int, crowd: float, data: int
) -> None:
    def overhead_s(cores: int) -> float:
        mesh = Mesh.of(world_size=4, pipeline=4 // data, data=data)
        return Fabric(machines(ranks_per_node=4, cores_per_node=cores), mesh).step_overhead_s

    assert overhead_s(cores) == pytest.approx(crowd * overhead_s(0))
    assert overhead_s(cores) > 0


def test_the_shards_of_a_host_share_its_link_to_others() -> None:
    """Each of two ranks of a host sums its half of the gradients with the other host, at the same time."""
    cluster = machines(ranks_per_node=2, inter=(0.0, 1e8), intra=(0.0, 1e18))
    fabric = Fabric(cluster, Mesh.of(world_size=4, data=4, shard=2))
    chain = Sharing(degree=2, on_host=2).applied(build_chain(chain_graph(2), profile_of()))
    whole = Layout(chain=chain, cuts=(0, 4), ranks=(0,), recompute=chain.column("forward_s") < 0)
    ((apart, shared),) = whole.trained_bytes()
    assert apart == 0
    one_alone_s = fabric.all_reduce_seconds(shared / 2, (0, 2))
    assert fabric.replica_seconds(whole).total_s == pytest.approx(2 * one_alone_s)


BLOCKS = 10


def test_ranks_that_share_updates_gather_them() -> None:
    cluster = machines(ranks_per_node=4, intra=(0, 100))
    for updates, of_all in ((1, 0.0), (2, 1 / 2), (4, 3 / 4)):
        mesh = Mesh.of(world_size=4, pipeline=1, data=4)
        chain = Sharing(updates=updates).applied(build_chain(chain_graph(2), profile_of()))
        whole = Layout(chain=chain, cuts=(0, 4), ranks=(0,), recompute=chain.column("forward_s") < 0)
        [(apart, shared)] = whole.trained_bytes()
        expected_s = of_all * (apart + shared) / 100
        assert Fabric(cluster, mesh).update_gather_seconds(whole) == pytest.approx(expected_s)


def plan(slowness, *, ranks=2, replicas=1, per_node=1, **config):
    count = 4
    candidate = (
        chain_graph(BLOCKS, output_bytes=400),
        profile_of(
            {"embed": (0.1, 0.2), "block": (0.1, 0.2), "head": (0.1, 0.2)}, saved_bytes=400, input_bytes=100
        ),
    )
    cluster = replace(machines(), ranks_per_node=per_node, cores_per_node=0, slowness=slowness)
    return make_plan(
        {count: candidate},
        cluster=cluster,
        config=Config.parse({"pipeline_parallel_degree": ranks, **config}),
        mesh=Mesh.of(world_size=ranks * replicas, pipeline=ranks, data=replicas),
    )


def units_of_ranks(found):
    sizes = [0] * found.mesh.pipeline
    for stage in found.stages:
        sizes[stage.rank] += len(stage.units)
    return sizes


def test_a_host_that_takes_twice_as_long_gets_half_as_much():
    even, uneven = plan((), pipeline="1f1b"), plan((2.0, 1.0), pipeline="1f1b")
    assert units_of_ranks(even) == [6, 6]
    assert units_of_ranks(uneven) == [4, 8]
    # As costs are stated for the fast one, a step takes longer than on two of those.
    assert even.prediction.step_s < uneven.prediction.step_s
    seconds = [stage.forward_s for stage in uneven.prediction.stages]
    assert seconds == pytest.approx([0.8, 0.8])
    assert (
        "Pipeline rank 0 takes 2.0 times as long as the fastest for the same work, and less of it."
        in uneven.why
    )
    assert not any("as long as the fastest" in why for why in even.why)

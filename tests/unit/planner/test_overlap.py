"""What of the messages between replicas is hidden behind what ranks compute."""

import numpy as np
import pytest
from graphs import chain_graph, profile_of
from hypothesis import given
from hypothesis import strategies as st

from planner.machines import machines
from shardwright.mesh import Mesh
from shardwright.planner.fabric import Fabric, Moment, exposed_after, exposed_before
from shardwright.planner.layout import Layout
from shardwright.planner.model_chain import build_chain

MIB = 2**20

moments = st.lists(
    st.builds(Moment, seconds=st.floats(0, 10), num_bytes=st.integers(1, 100 * MIB)), min_size=1, max_size=20
)
seconds = st.floats(0, 100)


def layout(cuts: tuple[int, ...], ranks: tuple[int, ...]) -> Layout:
    chain = build_chain(chain_graph(4, parameter_bytes=2 * MIB), profile_of())
    return Layout(chain=chain, cuts=cuts, ranks=ranks, recompute=np.zeros(chain.num_calls, dtype=bool))


def test_what_comes_early_is_hidden() -> None:
    of_blocks = [Moment(seconds, 2 * MIB) for seconds in range(8)]
    assert exposed_after(of_blocks, 8.0, occupancy=0.0) == 1.0  # the last bucket
    assert exposed_after(of_blocks, 4.0, occupancy=0.0) == 0.5
    assert exposed_after(of_blocks, 16.0, occupancy=0.0) == 16.0 - 7  # the first starts 7 s before the end


def test_one_bucket_waits_for_the_last_gradient() -> None:
    assert exposed_after([Moment(3.0, 1000), Moment(0.0, 1000)], 2.0, occupancy=0.0) == 2.0


@pytest.mark.parametrize("exposed", [exposed_after, exposed_before])
@given(moments, seconds, st.floats(0, 1))
def test_a_step_is_longer_by_no_more_than_everything(exposed, found, total_s, occupancy) -> None:
    longer_s = exposed(found, total_s, occupancy=occupancy)
    assert 0 <= longer_s <= total_s * (1 + 1e-9)
    assert exposed(found, total_s, occupancy=1.0) == pytest.approx(total_s)


@pytest.mark.parametrize("exposed", [exposed_after, exposed_before])
@given(moments, seconds, seconds)
def test_faster_links_never_expose_more(exposed, found, some_s, more_s) -> None:
    some_s, more_s = sorted((some_s, more_s))
    assert exposed(found, some_s, occupancy=0.1) <= exposed(found, more_s, occupancy=0.1) + 1e-9


@pytest.mark.parametrize("cores", [0, 2])
def test_cores_that_add_in_shared_memory_hide_nothing(cores: int) -> None:
    cluster = machines(ranks_per_node=2, cores_per_node=cores, intra=(0, MIB))
    sums = Fabric(cluster, Mesh.of(world_size=2, data=2)).replica_seconds(layout((0, 6), (0,)))
    assert (sums.hidden_s > 0) == (cores == 0)
    assert sums.total_s == pytest.approx(sums.exposed_s + sums.hidden_s)

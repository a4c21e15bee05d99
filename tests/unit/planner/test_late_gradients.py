"""Gradients are there from the first backward on: before it is the peak of one microbatch, and of GPipe.

What of the messages between replicas is hidden behind what ranks compute.
"""

from dataclasses import replace

import numpy as np
import pytest
from graphs import chain_graph, profile_of
from hypothesis import given
from hypothesis import strategies as st

from planner.machines import machines
from planner.test_layout import lay_out
from shardwright.mesh import Mesh
from shardwright.plan import MemoryPrediction
from shardwright.planner.chain import StateBytes
from shardwright.planner.fabric import Fabric, Moment, exposed_after, exposed_before
from shardwright.planner.layout import Layout
from shardwright.planner.model_chain import build_chain
from shardwright.planner.rank_memory import (
    rank_memory,
    scheduled_above,
)
from shardwright.schedule import Action, Kind, Schedule, simulate

# Four units: each keeps 1000 bytes and has a gradient of 400; around each are gradients of 80.
BLOCKS = 2
GRADIENTS, KEPT = 4 * 400, 4 * 1000


def one_stage(**changes: float) -> Layout:
    return lay_out(chain_graph(BLOCKS), (0, 4), (0,), profile_of(**changes))


def by_hand(num_microbatches: int, row: str) -> Schedule:
    """One stage whose actions are written as F0 F1 B0 B1."""
    kinds = {"F": Kind.FORWARD, "B": Kind.BACKWARD, "I": Kind.BACKWARD_INPUT, "W": Kind.BACKWARD_WEIGHT}
    actions = tuple(Action(kinds[each[0]], 0, int(each[1:])) for each in row.split())
    return Schedule(kind="by hand", stage_ranks=(0,), num_microbatches=num_microbatches, actions=(actions,))


def peak(layout: Layout, schedule: Schedule) -> MemoryPrediction:
    costs = layout.stage_costs()
    kept = simulate(schedule, costs, edges=layout.edges()).peak_bytes
    (found,) = rank_memory(
        layout, activation_bytes=kept, above=scheduled_above(schedule, layout, costs), optimizer_factor=1.0
    )
    return found


@pytest.mark.parametrize(
    ("row", "activations", "gradients"),
    [
        ("F0 B0", KEPT, 0),
        ("F0 F1 B0 B1", 2 * KEPT, 0),
        # When the third forward is over, the first backward has made them.
        ("F0 F1 B0 F2 B1 B2", 2 * KEPT, GRADIENTS),
        ("F0 B0 F1 B1", KEPT, GRADIENTS),
    ],
)
def test_the_first_backward_makes_the_gradients(row: str, activations: int, gradients: int) -> None:
    found = peak(one_stage(), by_hand(row.count("F"), row))
    assert (found.activations_bytes, found.gradients_bytes, found.work_bytes) == (activations, gradients, 80)
    assert found.peak_bytes == 2 * 1600 + activations + gradients + 80  # parameters and optimizer state


def test_they_come_while_activations_go() -> None:
    """Recomputed units keep 40 bytes: their gradients are more, so most is there before the last backward."""
    layout = one_stage(input_bytes=40).with_recompute(range(4))
    found = peak(layout, by_hand(1, "F0 B0"))
    # Of the first unit: what it recomputes, the gradients of the three behind, its input, its own gradient.
    assert found.peak_bytes == 2 * 1600 + 960 + 3 * 400 + 40 + 40


def sharing(most_reduced: int, gradients: int) -> Layout:
    """Two replicas have half of each parameter."""
    layout = one_stage()
    rows = StateBytes(parameters=200, gradients=gradients, optimized=200)
    shared = tuple(replace(use, shared=rows) for use in layout.chain.parameters)
    return replace(layout, chain=replace(layout.chain, parameters=shared, most_reduced=most_reduced))


def test_rows_of_shared_gradients_come_with_the_backward_too() -> None:
    """Bug: they counted all the time, also beside the whole ones of several microbatches."""
    reduced, kept = sharing(400, 200), sharing(0, 400)
    assert reduced.first_gradients().tolist() == [200] * 4
    assert kept.first_gradients().tolist() == [400] * 4
    assert kept.reduced_gradients().tolist() == [0] * 4
    found = peak(reduced, by_hand(1, "F0 B0"))
    assert (found.activations_bytes, found.gradients_bytes) == (KEPT, 0)


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

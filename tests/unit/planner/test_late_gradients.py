"""Gradients are there from the first backward on: before it is the peak of one microbatch, and of GPipe."""

from dataclasses import replace

import pytest
from graphs import chain_graph, profile_of

from planner.test_layout import lay_out
from shardwright.plan import MemoryPrediction
from shardwright.planner.chain import StateBytes
from shardwright.planner.layout import Layout
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

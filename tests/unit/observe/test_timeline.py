"""Measured events and the idle share."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observe.plans import measured_as, simulation
from shardwright.observe import MeasuredEvent, bubble, measured_events
from shardwright.schedule import KINDS, Action, Kind, place_stages

F0 = Action(Kind.FORWARD, 0, 0)
F1 = Action(Kind.FORWARD, 1, 0)


def test_all_ranks_on_one_clock() -> None:
    rows = [[(F0, 100.0, 101.0, 0.0)], [(F1, 7.5, 9.0, 0.5)]]
    assert measured_events(rows, step_starts=(100.0, 7.0)) == [
        MeasuredEvent(0, F0, 0.0, 1.0, 0.0),
        MeasuredEvent(1, F1, 0.5, 2.0, 0.5),
    ]


def test_memory_belongs_to_the_ends_of_actions() -> None:
    rows = [[(F0, 100.0, 101.0, 0.0), (F1, 101.0, 102.0, 0.0)], [(F1, 100.0, 103.0, 0.0)]]
    events = measured_events(rows, step_starts=(100.0, 100.0), memory=[[7, 9], []])
    assert [event.bytes_in_use for event in events] == [7, 9, 0]


def test_waiting_is_idle() -> None:
    # rank 0 | work
    # rank 1 | wait work
    events = [MeasuredEvent(0, F0, 10.0, 12.0), MeasuredEvent(1, F1, 10.0, 14.0, 2.0)]
    assert bubble(events, num_ranks=2) == 0.5
    assert bubble(events, num_ranks=2, step_s=8.0) == 0.75
    assert bubble(events, num_ranks=4) == 0.75


@given(
    kind=st.sampled_from(KINDS),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    start_s=st.floats(-1e3, 1e6),
)
def test_measured_as_predicted_gives_the_predicted_bubble(
    kind: str, num_ranks: int, num_microbatches: int, start_s: float
) -> None:
    stages_per_rank = 2 if kind in ("interleaved_1f1b", "zb_v") else 1
    ranks = place_stages(kind, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    simulated = simulation(kind, ranks, num_microbatches)
    measured = measured_as(simulated, start_s=start_s)
    assert bubble(measured, num_ranks=num_ranks) == pytest.approx(simulated.bubble, abs=1e-6)

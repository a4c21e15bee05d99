"""Copies of activations to the memory of the host, and back."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedule.cases import schedule_of
from shardwright.cluster import Link
from shardwright.errors import ScheduleError
from shardwright.schedule import (
    KINDS,
    Action,
    Kind,
    Schedule,
    StageCost,
    build_schedule,
    lower,
    place_stages,
    simulate,
    validate,
)

BACKWARD = (Kind.BACKWARD, Kind.BACKWARD_INPUT)


def row_of(text):
    return schedule_of(text.replace(",", " ")).actions[0]


def alone(text):
    """A schedule of one rank."""
    return Schedule("alone", (0,), 1 + max(a.microbatch for a in row_of(text)), (row_of(text),))


def offloaded(schedule, chosen):
    """The schedule, with copies of these (stage, microbatch): out after F, back one action before B or I."""
    rows = []
    for row in schedule.actions:
        new = []
        for action in row:
            key = action.stage, action.microbatch
            if key in chosen and action.kind in BACKWARD:
                place = len(new) - 1 if new and new[-1].is_compute else len(new)
                offload = new.index(Action(Kind.OFFLOAD, *key))
                new.insert(max(place, offload + 1), Action(Kind.LOAD, *key))
            new.append(action)
            if key in chosen and action.kind is Kind.FORWARD:
                new.append(Action(Kind.OFFLOAD, *key))
        rows.append(tuple(new))
    return replace(schedule, actions=tuple(rows))


def test_copies_run_beside_compute_and_free_memory():
    """The picture of `host_copies`, with numbers: a copy of 8 bytes at 4 bytes a second takes two seconds."""
    schedule = alone("0F0,0OFFLOAD0,0F1,0F2,0B2,0LOAD0,0B1,0B0")
    costs = [StageCost(1.0, 2.0, saved_bytes=8)]
    found = simulate(schedule, costs, host=Link(latency_s=0.0, bandwidth_Bps=4.0))
    assert [(str(e.action), e.start_s, e.end_s) for e in found.host_copies] == [
        ("0OFFLOAD0", 1, 3),
        ("0LOAD0", 5, 7),
    ]
    assert found.step_s == simulate(schedule, costs).step_s == 9
    # Microbatches 0, 1, 2 are there from 0, 1, 2 s; the first leaves at 3 s, before the others end.
    assert found.peak_bytes == (24,)
    assert found.transfers == ()


@pytest.mark.parametrize(
    ("cells", "why"),
    [
        ("0OFFLOAD0,0F0,0B0", "0OFFLOAD0: nothing is kept then .* Put it after its F"),
        ("0F0,0OFFLOAD0,0OFFLOAD0,0LOAD0,0B0", "0OFFLOAD0: nothing is kept then"),
        ("0F0,0B0,0OFFLOAD0", "0OFFLOAD0: nothing is kept then"),
        ("0F0,0LOAD0,0B0", "0LOAD0: nothing is offloaded then. Put it after its OFFLOAD"),
        ("0F0,0OFFLOAD0,0LOAD0,0LOAD0,0B0", "0LOAD0: nothing is offloaded then"),
        ("0F0,0OFFLOAD0,0B0,0LOAD0", "0B0: what it needs is in the host's memory. Put the LOAD before it"),
        ("0F0,0OFFLOAD0", "0OFFLOAD0: nothing loads it again"),
        ("0F0,0OFFLOAD0,0I0,0LOAD0,0W0", "0I0: what it needs is in the host's memory"),
    ],
)
def test_copies_that_no_run_could_make(cells, why):
    for judge in (validate, lambda schedule: simulate(schedule, [StageCost(1.0, 2.0, 1.0)])):
        with pytest.raises(ScheduleError, match=f"rank 0: {why}"):
            judge(alone(cells))


@st.composite
def schedules(draw):
    kind = draw(st.sampled_from(KINDS))
    ranks, microbatches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    stage_ranks = place_stages(kind, num_ranks=ranks)
    microbatches = microbatches * ranks if kind == "interleaved_1f1b" else microbatches
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=microbatches)
    everything = [(s, k) for s in range(len(stage_ranks)) for k in range(microbatches)]
    return schedule, draw(st.sets(st.sampled_from(everything)))


@given(schedules(), st.booleans())
def test_any_activations_may_be_copied_in_any_schedule(case, shares_cores):
    schedule, chosen = case
    copied = offloaded(schedule, chosen)
    validate(copied)
    validate(lower(copied))
    cost = StageCost(1.0, 2.0, 1.0, saved_bytes=10)
    costs = [cost] * schedule.num_stages
    cores = {"cores": 1} if shares_cores else {}
    plain = simulate(schedule, costs, **cores)
    free = simulate(copied, costs, **cores)
    assert free.step_s == pytest.approx(plain.step_s)  # copies that take no time delay nothing
    slow = simulate(copied, costs, host=Link(latency_s=0.0, bandwidth_Bps=5.0), **cores)
    assert slow.step_s >= free.step_s - 1e-9
    assert len(slow.host_copies) == 2 * len(chosen)
    assert all(e.end_s - e.start_s == pytest.approx(2.0) for e in slow.host_copies)
    assert all(a <= b for a, b in zip(free.peak_bytes, plain.peak_bytes, strict=True))
    lowered = simulate(lower(copied), costs, host=Link(latency_s=0.0, bandwidth_Bps=5.0))
    direct = simulate(copied, costs, host=Link(latency_s=0.0, bandwidth_Bps=5.0))
    assert lowered.step_s == pytest.approx(direct.step_s)


UNITS = StageCost(10.0, 20.0, saved_bytes=7, offload_bytes=100, window_bytes=30, tail_bytes=20)
"""Ten units of ten bytes, of which three are there at once, and two leave behind the forward."""


def test_units_leave_during_the_forward_and_come_back_during_the_backward():
    """80 bytes beside each; the last two units stay, as the backward follows."""
    schedule = alone("0F0,0B0").with_host_copies({0})
    fast = simulate(schedule, [UNITS], host=Link(latency_s=0.0, bandwidth_Bps=10.0))
    assert [(e.start_s, e.end_s) for e in fast.events] == [(0, 10), (10, 30)]
    assert fast.host_copies == ()
    assert fast.peak_bytes == (37,)
    slow = simulate(schedule, [UNITS], host=Link(latency_s=0.0, bandwidth_Bps=2.0))
    assert [(e.start_s, e.end_s) for e in slow.events] == [(0, 40), (40, 80)]
    assert simulate(schedule, [UNITS], cores=1, host=Link(latency_s=0.0, bandwidth_Bps=2.0)).step_s == 80
    assert simulate(schedule, [UNITS]).step_s == 30


def test_the_channel_is_busy_for_every_byte_once():
    """GPipe: a forward's copies wait for the last units of the one before; then the loads for them all."""
    schedule = alone("0F0,0F1,0B0,0B1").with_host_copies({0})
    assert str(schedule) == "rank 0 | 0F0 0OFFLOAD0 0LOAD0 0F1 0OFFLOAD1 0LOAD1 0B0 0B1"
    schedule = alone("0F0,0F1,0F2,0B0,0B1,0B2").with_host_copies({0})
    link = Link(latency_s=0.0, bandwidth_Bps=2.0)
    for cores in ({}, {"cores": 1}):
        found = simulate(schedule, [UNITS], host=link, **cores)
        # Each of three microbatches moves 100 bytes out and in, at 2 a second, but for tails that stay.
        stayed = 2 * 3 - len(found.host_copies)
        assert found.step_s == pytest.approx((3 * 2 * 100 - 20 * stayed) / 2)
    assert found.peak_bytes == (3 * 7 + 30 + 20,)

"""The simulator against hand-made timelines, and against slow, exact replays written apart from it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import Link
from shardwright.errors import ScheduleError
from shardwright.schedule import (
    KINDS,
    Edge,
    StageCost,
    build_schedule,
    chain_edges,
    lower,
    place_stages,
    simulate,
    unit_costs,
)

from .cases import ODD_PLACEMENTS, all_edges, schedule_of
from .slow_replay import SlowReplay


def times(simulation):
    """action -> (start, end)."""
    return {str(event.action): (event.start_s, event.end_s) for event in simulation.events}


def constant_link(latency_s, bandwidth_Bps=1.0):
    return lambda sender, receiver: Link(latency_s=latency_s, bandwidth_Bps=bandwidth_Bps)


def test_peaks():
    costs = [StageCost(1, 2, 1, saved_bytes=10), StageCost(1, 2, 1, saved_bytes=100, weight_bytes=30)]
    schedule = build_schedule("zb_h1", stage_ranks=(0, 1), num_microbatches=4)
    simulation = simulate(schedule, costs)
    assert simulation.peak_microbatches == (2, 1)
    # Rank 0 keeps two microbatches. Rank 1: one waits for its W with 30 bytes, one is between F and I.
    assert simulation.peak_bytes == (20, 130)


CROWDED = [(0, 1, 2), (2, 1, 0), (0, 1, 2, 1, 0), (0, 1, 2, 3, 0, 1)]
MACHINES = st.sampled_from([(0, 0), (1, 0), (1, 2), (2, 0), (2, 2), (3, 0)])
LINKS = st.none() | st.tuples(st.sampled_from([0.0, 0.25, 2.0]), st.sampled_from([1.0, 4.0, 64.0]))


@settings(deadline=None, max_examples=200)
@given(
    kind=st.sampled_from(KINDS),
    stage_ranks=st.sampled_from(CROWDED) | st.sampled_from([*ODD_PLACEMENTS, (0, 1, 0, 1)]),
    m=st.integers(1, 5),
    seconds=st.lists(st.integers(1, 9), min_size=9, max_size=9),
    machine=MACHINES,
    link=LINKS,
    skips=st.booleans(),
)
def test_times_are_those_of_the_exact_replay(kind, stage_ranks, m, seconds, machine, link, skips):
    cores, ranks_per_node = machine
    n = len(stage_ranks)
    costs = [StageCost(seconds[s], seconds[s] + seconds[s + 1], seconds[s]) for s in range(n)]
    edges = all_edges(n) if skips else chain_edges(n, num_bytes=8)
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=m, costs=costs)
    way = constant_link(*link) if link else None
    expected = SlowReplay(schedule, costs, edges, way, cores, ranks_per_node).run()
    options = {"edges": edges, "link": way, "cores": cores, "ranks_per_node": ranks_per_node}
    for rows in (schedule, lower(schedule, edges)):
        found = times(simulate(rows, costs, **options))
        assert found.keys() == expected.keys()
        for action, interval in expected.items():
            assert found[action] == pytest.approx(interval), action


@settings(deadline=None, max_examples=40)
@given(kind=st.sampled_from(KINDS), p=st.integers(1, 4), m=st.integers(1, 6), latency=st.floats(0, 3))
def test_more_of_anything_is_never_slower(kind, p, m, latency):
    """With the rows fixed: slower links, slower stages, fewer cores never shorten the step."""
    stage_ranks = place_stages(kind, num_ranks=p)
    schedule = build_schedule(kind, stage_ranks=stage_ranks, num_microbatches=m)
    costs = unit_costs(len(stage_ranks))
    base = simulate(schedule, costs).step_s
    assert simulate(schedule, costs, link=constant_link(latency)).step_s >= base
    assert simulate(schedule, [*costs[:-1], StageCost(1.5, 2, 1)]).step_s >= base
    assert simulate(schedule, costs, action_overhead_s=0.1).step_s >= base
    assert simulate(schedule, costs, cores=1).step_s >= base - 1e-9


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cores": -1}, "cores is -1"),
        ({"ranks_per_node": -2}, "ranks_per_node is -2"),
        ({"action_overhead_s": -0.1}, "action_overhead_s is -0.1"),
        ({"edges": [Edge(0, 5)]}, "edge 0 -> 5 is not possible"),
        ({"costs": unit_costs(1)}, "1 costs were given for 2 stages"),
        ({"schedule": schedule_of("0F0 0B0", "1F0")}, "1B0 is missing"),
    ],
)
def test_what_cannot_be_simulated_is_refused(options, words):
    arguments = {"schedule": schedule_of("0F0 0B0", "1F0 1B0"), "costs": unit_costs(2)} | options
    with pytest.raises(ScheduleError, match=words):
        simulate(arguments.pop("schedule"), arguments.pop("costs"), **arguments)


@pytest.mark.parametrize("cores", [0, 1])
def test_a_deadlock_is_an_error_not_an_endless_loop(cores):
    schedule = schedule_of("0F0 2F0 0F1 2F1", "1F1 1F0")
    with pytest.raises(ScheduleError, match="the schedule deadlocks: 2F0 on rank 0 waits for ever"):
        simulate(schedule, unit_costs(3), cores=cores)


def test_a_link_that_occupies_cores_takes_time_from_both_ends():
    edges = [Edge(0, 1, num_bytes=10, gradient_bytes=20)]
    link = Link(latency_s=0.5, bandwidth_Bps=10.0, occupancy=0.5)
    schedule = schedule_of("0F0 0B0", "1F0 1B0")
    simulation = simulate(schedule, unit_costs(2), edges=edges, link=lambda a, b: link)
    seconds = {str(e.action): e.end_s - e.start_s for e in simulation.events}
    # A message takes 1.5 s forward and 2.5 s backward, of which half is work for the cores at its ends.
    assert seconds == {"0F0": 1.75, "0B0": 3.25, "1F0": 1.75, "1B0": 3.25}


def test_unread_messages_pile_up_where_a_rank_runs_ahead() -> None:
    slow_last = [StageCost(1, 1), StageCost(3, 3)]
    gpipe = build_schedule("gpipe", stage_ranks=(0, 1), num_microbatches=4)
    # Rank 1 starts its forwards at 1, 4, 7, 10; those of rank 0 end at 1, 2, 3, 4.
    assert simulate(gpipe, slow_last).unread == {(0, 1): 2, (1, 0): 1}
    in_turns = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=4)
    assert simulate(in_turns, slow_last).unread == {(0, 1): 1, (1, 0): 1}

"""Who is named as slow, and who is not: steps that are made up, on made-up ranks.

Where the time of a run has gone: lives that are made up, second by second.
"""

import random

import pytest

from observe.plans import two_stage_plan
from shardwright.observe.goodput import Goodput, Spent
from shardwright.observe.metrics import Metric, StepRecord
from shardwright.observe.stragglers import Stragglers
from shardwright.observe.summary import totals_of


@pytest.fixture
def two_stages():
    return two_stage_plan()


def run(judge, steps, *, seconds=0.5, first=1):
    """Feeds steps of (work, between, held up) by rank; returns what was told, and the slow steps."""
    told, slow = [], []
    for number, (work_s, between_s, held_up_s) in enumerate(steps, first):
        found = judge.step(
            number,
            seconds=seconds,
            work_s=work_s,
            between_s=between_s,
            held_up_s=held_up_s or [0.0] * len(work_s),
        )
        if found is not None:
            slow.append((number, found.rank, found.excess_s))
            told += [found.told] if found.told else []
    return told, slow


def usual(num, ranks=2, spread=0.02, seed=1):
    draw = random.Random(seed)
    return [
        ([0.4 * draw.uniform(1 - spread, 1 + spread) for _ in range(ranks)], [0.0] * ranks, None)
        for _ in range(num)
    ]


def test_a_busy_machine_accuses_nobody():
    """Each rank is slow now and then, by the luck of who shares its core."""
    for seed in range(20):
        assert run(Stragglers([0, 1]), usual(300, spread=0.5, seed=seed))[0] == []


def test_a_host_on_which_all_become_slow_accuses_nobody():
    slow = [([3 * each for each in work], between, held) for work, between, held in usual(50)]
    assert run(Stragglers([0, 1]), usual(50) + slow, seconds=1.3)[0] == []


@pytest.mark.parametrize("pipeline_rank", [[0, 0, 0], [0, 1, 2]])
@pytest.mark.parametrize("between", [True, False])
def test_a_rank_that_becomes_slow_is_named_once_and_again_when_it_is_over(pipeline_rank, between):
    late = [
        ([a, b + 0.4 * (not between), c], [0.0, 0.4 * between, 0.0], None) for (a, b, c), _, _ in usual(40, 3)
    ]
    steps = usual(20, 3) + late + usual(20, 3)
    told, slow = run(Stragglers(pipeline_rank), steps, seconds=0.9)
    assert len(told) == 2
    assert told[0].startswith("rank 1 keeps the others waiting since step 2")
    assert "% of a step" in told[0]
    assert ("between the steps" in told[0]) is between
    assert told[1] == "rank 1 is as fast as the others again"
    in_force = [(rank, excess_s) for number, rank, excess_s in slow if 35 < number < 60]
    assert {rank for rank, _ in in_force} == {1}
    assert all(0.3 < excess_s < 0.5 for _, excess_s in in_force)


def test_replicas_of_which_one_is_slow_from_the_start():
    steps = [([0.2, 0.2, 0.6, 0.2], [0.0] * 4, None)] * 30
    told, _ = run(Stragglers([0, 0, 0, 0]), steps, seconds=0.7)
    assert told[0].startswith(
        "rank 2 keeps the others waiting since step 4: 400 ms more than its due, 57% of"
    )


def test_stages_of_different_work_are_judged_by_the_plan(two_stages):
    judge = Stragglers([0, 1])
    judge.follow(two_stages)
    weights = judge._weights
    steps = [([weights[0] * 100, weights[1] * 100], [0.0, 0.0], None)] * 60
    assert run(judge, steps, seconds=1.0)[0] == []
    judge = Stragglers([0, 1])
    judge.follow(two_stages)
    steps = [([weights[0] * 100, weights[1] * 100 + 0.9], [0.0, 0.0], None)] * 60
    told, _ = run(judge, steps, seconds=1.5)
    assert told[0].startswith("rank 1 keeps the others waiting since step 4")


def test_ranks_that_share_layers_wait_inside_of_their_work():
    """The rank that comes late has waited for nobody; the other one's work contains its wait."""
    steps = usual(20) + [([0.8, 0.4], [0.0, 0.4], None)] * 30
    told, _ = run(Stragglers([0, 0], [(0, 1)]), steps, seconds=0.8)
    assert told[0].startswith("rank 1 keeps the others waiting")
    assert "between the steps" in told[0]


def test_a_process_that_stood_still_is_named_at_once():
    steps = [*usual(20), ([0.4, 2.4], [0.0, 0.0], [0.0, 1.8]), *usual(20)]
    told, slow = run(Stragglers([0, 1]), steps)
    (line,) = told
    assert line.startswith("rank 1 paused for 2.0")
    assert "about step 21" in line
    assert "stood still" in line
    assert [number for number, _, excess_s in slow if excess_s] == [21]


def test_a_host_that_stood_still_is_no_rank_s_fault():
    steps = [*usual(20), ([2.4, 2.4], [0.0, 0.0], [1.8, 1.8]), *usual(20)]
    assert run(Stragglers([0, 1]), steps)[0] == []


def test_pauses_are_told_three_times_at_most():
    paused = [([0.4, 0.4], [2.0, 0.0], None), *usual(30)]
    told, slow = run(Stragglers([0, 1]), usual(20) + 5 * paused)
    assert run(Stragglers([0, 1]), [*usual(20), ([1.5, 0.4], [2.0, 0.0], None)], seconds=1.6)[0] == []
    assert len(told) == 3
    assert told[0].startswith("rank 0 paused for 2.00 s about step 21")
    assert len([excess_s for *_, excess_s in slow if excess_s]) == 5


def test_a_rank_that_is_slow_for_good_has_not_paused():
    slow = [([0.4, 5.4], [0.0, 0.0], None)] * 60
    told, _ = run(Stragglers([0, 1]), usual(10) + slow, seconds=5.4)
    (line,) = told
    assert line.startswith("rank 1 keeps the others waiting since step 11: 5.00 s")


def test_a_single_rank_has_nobody_to_keep_waiting():
    assert run(Stragglers([0]), usual(20, 1)) == ([], [])


def test_the_rank_that_cost_most_is_told_of_a_run():
    slow = [{"slow_rank": rank, "slow_s": 0.5} for rank in (0, 1, 1)] + [{}] * 3
    steps = [StepRecord(step=n, seconds=1.0, samples=8, **each) for n, each in enumerate(slow, start=1)]
    assert totals_of(steps).slowest == "rank 1: 17%"
    assert totals_of(steps[3:]).slowest == ""
    short = [StepRecord(step=1, seconds=100.0, samples=8, slow_rank=1, slow_s=0.4)]
    assert totals_of(short).slowest == ""  # "rank 1: 0%" told nothing


def life(begun_s, steps, *, each_s=2.0, before=(), start_s=10.0, slow_s=None):
    """A life that begins, makes steps, and is killed; returns its counts and the lines of its metrics."""
    goodput, lines, now_s = Goodput(begun_s, before), [], begun_s + start_s - each_s
    if before and before[-1][Metric.UNIX] > begun_s:
        now_s = before[-1][Metric.UNIX] + start_s - each_s
    for step in steps:
        now_s += each_s
        metrics = goodput.step_done(StepRecord(step=step, seconds=each_s, samples=1, slow_s=slow_s), now_s)
        lines.append({"step": step, Metric.UNIX: now_s, **metrics})
    return goodput, lines


def rounded(spent):
    seconds = (spent.productive_s, spent.starts_s, spent.saves_s, spent.waits_s, spent.lost_s)
    return (*(round(each, 6) for each in seconds), spent.lost_steps, spent.restarts)


def test_what_was_done_after_the_last_save_is_lost_in_a_restart():
    _, lines = life(1000.0, range(1, 11))
    goodput, _ = life(1000.0, range(6, 16), before=lines)
    assert rounded(goodput.spent) == (8.0 + 18.0, 20.0, 0, 0, 10.0, 5, 1)
    # From the launch to the last step, nothing is counted twice, and nothing is left out.
    assert goodput.spent.elapsed_s == pytest.approx(10 + 18 + 10 + 18)


def test_a_run_without_checkpoints_loses_all_of_its_steps():
    _, lines = life(1000.0, range(1, 11))
    goodput, _ = life(1000.0, range(1, 4), before=lines)
    assert rounded(goodput.spent) == (4.0, 20.0, 0, 0, 18.0, 10, 1)


def test_the_night_between_two_launches_is_nobody_s():
    _, lines = life(1000.0, range(1, 11))
    goodput, _ = life(90_000.0, range(11, 16), before=lines)
    assert rounded(goodput.spent) == (18.0 + 8.0, 20.0, 0, 0, 0, 0, 1)


def test_a_run_that_begins_anew_in_the_folder_of_another():
    _, lines = life(1000.0, range(1, 11))
    goodput, _ = life(90_000.0, range(1, 3), before=lines)
    assert rounded(goodput.spent) == (2.0, 10.0, 0, 0, 0, 0, 0)


def test_ranks_that_form_anew_in_the_same_process():
    goodput, _ = life(1000.0, [*range(1, 11), *range(8, 12)])
    assert rounded(goodput.spent) == (18.0 - 6.0 + 6.0, 10.0 + 2.0, 0, 0, 6.0, 3, 1)


def test_seconds_for_which_steps_wait():
    goodput, _ = life(1000.0, range(1, 11), slow_s=0.5)
    assert rounded(goodput.spent) == (13.5, 10.0, 0, 4.5, 0, 0, 0)
    goodput.event("checkpoint_save_began", {"step": 10, "seconds": 0.25})
    goodput.event("checkpoint_saved", {"step": 10, "seconds": 1.5})
    goodput.event("checkpoint_saved", {"step": 11, "seconds": 1.0})
    goodput.event("checkpoint_save_failed", {"step": 12})
    goodput.step_done(StepRecord(step=11, seconds=1.0, samples=1), 1000.0 + 28.0 + 3.0)
    assert rounded(goodput.spent) == (13.5 + 1.75, 10.0, 1.25, 4.5, 0, 0, 0)


def test_metrics_tell_of_it_once_a_second_and_are_read_again():
    goodput, lines = life(1000.0, range(1, 101), each_s=0.1)
    told = [line for line in lines if Metric.ELAPSED in line]
    assert 10 <= len(told) <= 12
    assert Spent.of_metrics(lines).productive_s == pytest.approx(goodput.spent.productive_s, abs=1.0)
    assert Spent.of_metrics(lines[1:2]) is None


def test_lines_of_another_kind_are_no_earlier_life():
    before = [{"step": "x", Metric.UNIX: 5.0}, {"step": 1}, {"step": 2, Metric.UNIX: float("nan")}]
    goodput, _ = life(1000.0, range(1, 3), before=[])
    again = Goodput(1000.0, before)
    for step, now_s in ((1, 1010.0), (2, 1012.0)):
        again.step_done(StepRecord(step=step, seconds=2.0, samples=1), now_s)
    assert rounded(again.spent) == rounded(goodput.spent)


def test_a_line_for_people():
    spent = Spent(productive_s=70, starts_s=10, saves_s=5, waits_s=10, lost_s=5, lost_steps=1, restarts=2)
    told = str(spent)
    assert told.startswith("productive 70% of ")
    assert "waiting for slow ranks 10.0 s" in told
    assert told.endswith("lost 5.00 s (1 step, 2 restarts)")
    assert "saves" not in str(Spent(productive_s=1000, saves_s=1))

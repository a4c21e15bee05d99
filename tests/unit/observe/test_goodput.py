"""Where the time of a run has gone: lives that are made up, second by second."""

import pytest

from shardwright.observe.goodput import Goodput, Spent
from shardwright.observe.metrics import Metric, StepRecord


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


def test_a_run_without_trouble():
    goodput, _ = life(1000.0, range(1, 11))
    assert rounded(goodput.spent) == (18.0, 10.0, 0, 0, 0, 0, 0)
    assert goodput.spent.share == pytest.approx(18 / 28)


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

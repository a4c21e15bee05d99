"""What is concluded from the pages of ranks, and how the command shows it."""

import json
import mmap
import os
import time

import pytest
from cli.calling import call

from shardwright.flight_record import PAGE_BYTES, Page, code_of, code_of_end, keep
from shardwright.observe import RunFolder, run_status
from shardwright.observe.run_status import format_statuses, held_up, read_statuses


@pytest.fixture
def leave(tmp_path, monkeypatch):
    """Leaves the page of a rank of this process in a run folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a" / "logs").mkdir(parents=True)

    def left(rank, *, noted=(), steps=0, ago_s=0.0, **beat):
        now_s = time.monotonic()
        page = Page(mmap.mmap(-1, PAGE_BYTES), rank)
        page.progress(steps, has_saved=False, step_s=0.5, memory_bytes=2**30)
        for number, code in enumerate(noted):
            page.cells[4 * number] = code
            page.cells[4 * number + 1] = now_s - ago_s - len(noted) + number + 1
        page.beat(**{"waits": False, "does": "in step 3, at /home/u/train.py:7", **beat})
        keep(tmp_path / "runs" / "a", rank, page.content())

    return left


def states(tmp_path):
    return {each.rank: each.state for each in read_statuses(RunFolder(tmp_path / "runs" / "a"))}


def test_a_table_of_all_ranks_names_whom_the_others_wait_for(leave, tmp_path):
    leave(0, noted=[code_of(1, 0, 2)], ago_s=31, waits=True, waits_for=(2,), steps=2)
    leave(2, noted=[code_of(1, 0, 2)], ago_s=31, waits=True, waits_for=(1,), steps=2)
    leave(1, noted=[code_of(0, 1, 3)], ago_s=31, steps=2)
    statuses = read_statuses(RunFolder(tmp_path / "runs" / "a"))
    lines = format_statuses(statuses).splitlines()
    assert lines[1].split()[3:8] == ["waits", "3", "backward", "of", "microbatch"]
    assert "31.0 s" in lines[1]
    assert "1.0 GiB" in lines[1]
    assert lines[-1] == "rank 1 keeps 0, 2 waiting: forward of microbatch 3 on stage 1, train.py:7"


def test_ranks_that_get_on_are_not_accused(leave, tmp_path):
    leave(0, noted=[code_of(1, 0, 2)], ago_s=0.1, waits=True, waits_for=(1,))
    leave(1, noted=[code_of(0, 1, 3)], ago_s=0.1)
    assert held_up(read_statuses(RunFolder(tmp_path / "runs" / "a"))) == []


def test_ranks_that_wait_for_each_other_are_told(leave, tmp_path):
    leave(0, noted=[code_of(1, 0, 2)], ago_s=9, waits=True, waits_for=(1,))
    leave(1, noted=[code_of(0, 1, 3)], ago_s=9, waits=True, waits_for=(0,))
    (line,) = held_up(read_statuses(RunFolder(tmp_path / "runs" / "a")))
    assert line == "ranks wait for each other: rank 0 for 1; rank 1 for 0"


@pytest.mark.parametrize(
    ("kernel", "state", "told"),
    [
        ("T", "stopped", "rank 1 holds up the others: a signal has stopped it"),
        ("Z", "gone", "rank 1 holds up the others: its process has ended without a word"),
        ("S", "silent", "rank 1 holds up the others: it has run no Python for 9.0"),
    ],
)
def test_a_rank_without_a_beat(leave, tmp_path, monkeypatch, kernel, state, told):
    leave(0, noted=[code_of(1, 0, 2)], ago_s=9, waits=True, waits_for=(1,))
    leave(1, noted=[code_of(0, 1, 3)], ago_s=9, at_s=time.monotonic() - 9)
    monkeypatch.setattr(run_status, "is_the_same", lambda beat: True)
    pages = [run_status._page(tmp_path / "runs" / "a" / "ranks" / f"rank{rank}") for rank in (0, 1)]
    statuses = []
    for page, letter in zip(pages, ("S", kernel), strict=True):
        monkeypatch.setattr(run_status, "state_of", lambda process, letter=letter: letter)
        statuses.append(run_status._status(page))
    assert [each.state for each in statuses] == ["waits", state]
    assert held_up(statuses)[0].startswith(told)


def test_a_rank_that_has_ended_says_why(leave, tmp_path):
    leave(0, at_s=float("inf"), does="has ended with ValueError: no", steps=4, noted=[code_of_end(4)])
    (status,) = read_statuses(RunFolder(tmp_path / "runs" / "a"))
    assert (status.state, status.does, status.step) == ("ended", "has ended with ValueError: no", 4)


def test_another_host_is_judged_by_its_clock_with_patience(leave, tmp_path, monkeypatch):
    leave(0)
    monkeypatch.setattr(run_status, "space_of_processes", lambda: "another")
    assert states(tmp_path) == {0: "works"}
    monkeypatch.setattr(run_status.time, "time", lambda: time.time_ns() / 1e9 + 60)
    assert states(tmp_path) == {0: "works"}  # a shared folder may show a page so late
    monkeypatch.setattr(run_status.time, "time", lambda: time.time_ns() / 1e9 + 120)
    assert states(tmp_path) == {0: "silent"}


def test_the_command_shows_a_rank_in_full(leave, capsys):
    leave(0, noted=[code_of(0, 0, 1), code_of(1, 0, 1)], stack="  train.py:7 in main", steps=2)
    leave(1)
    code, out, err = call(capsys, "status", "a", "--rank", "0")
    assert (code, err) == (0, "")
    assert "1.000 s  forward of microbatch 1 on stage 0" in out
    assert out.rstrip().endswith("train.py:7 in main")
    code, out, _ = call(capsys, "status", "a", "--json")
    first, second = json.loads(out)
    assert code == 0
    assert first["actions"][0]["action"] == "forward of microbatch 1 on stage 0"
    assert (first["process"], second["rank"]) == (os.getpid(), 1)


def test_following_ends_with_the_run(leave, capsys):
    leave(0, at_s=float("inf"))
    code, out, _ = call(capsys, "status", "a", "--follow")
    assert code == 0
    assert "ended" in out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("status", "nothing"), "there is no run folder nothing."),
        (("status", "a"), "no rank has left word in runs/a/ranks"),
    ],
)
def test_what_is_not_there_is_told(tmp_path, monkeypatch, capsys, words, told):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "a" / "logs").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "ranks").mkdir()
    (tmp_path / "runs" / "a" / "ranks" / "rank0").write_text("x")
    (tmp_path / "runs" / "a" / "ranks" / "rank1").mkdir()
    code, _, err = call(capsys, *words)
    assert code == 2
    assert told in err


def test_a_rank_that_is_not_there_is_told(leave, capsys):
    leave(0)
    code, _, err = call(capsys, "status", "a", "--rank", "5")
    assert code == 2
    assert "rank 5 has left no word in this run folder; there are 0." in err

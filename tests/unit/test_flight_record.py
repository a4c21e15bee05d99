"""The page of a rank: what is noted on it comes back, in order, also from a page that is damaged."""

import math
import mmap
import os
import subprocess
import sys

import pytest

from shardwright import flight_record
from shardwright.flight_record import (
    LAST_ACTIONS,
    NEXT,
    PAGE_BYTES,
    Page,
    code_of,
    code_of_end,
    is_the_same,
    keep,
    read_page,
    read_progress,
)
from shardwright.runtime import action_loop
from shardwright.schedule import Kind


def page(rank=0):
    return Page(mmap.mmap(-1, PAGE_BYTES), rank)


def test_what_is_noted_is_read():
    mine = page(3)
    mine.beat(waits=True, does="in step 8", stack="a\nb", waits_for=(1, 2), at_s=5.0)
    mine.progress(7, has_saved=True, step_s=0.25, memory_bytes=99)
    found = read_page(mine.content())
    assert found.beat[:7] == (3, os.getpid(), True, 5.0, "in step 8", "a\nb", (1, 2))
    assert (found.steps, found.step_s, found.memory_bytes) == (7, 0.25, 99)
    assert found.actions == ()
    assert read_progress(mine.content()) == (7, True)


def test_of_many_actions_the_last_ones_are_kept_in_order():
    mine = page()
    mine.beat(waits=False)
    at = 0
    for number in range(1000):
        at = NEXT[at]
        mine.cells[at], mine.cells[at + 1], mine.cells[at + 2] = code_of(1, 2, number), float(number + 1), 0.0
    actions = read_page(mine.content()).actions
    assert [action.microbatch for action in actions] == list(range(1000 - LAST_ACTIONS, 1000))
    assert {(action.kind, action.stage) for action in actions} == {(1, 2)}


def test_the_loop_notes_on_the_page_it_is_given(monkeypatch):
    mine = page()
    mine.beat(waits=False)
    monkeypatch.setattr(action_loop, "_NOTED", action_loop._Noted())
    action_loop.note_actions_on(mine)
    action_loop.note_begin(Kind.FORWARD, 4)
    assert action_loop.present_action() == "forward of microbatch 4 on stage 0"
    action_loop.note_begin(Kind.BACKWARD)
    action_loop.note_end_of_step(12)
    assert action_loop.present_action() == ""
    noted = [(action.kind, action.microbatch) for action in read_page(mine.content()).actions]
    assert noted == [(0, 4), (1, 4), (-1, 12)]
    assert code_of_end(12) > code_of(9, 2**16 - 1, 2**20 - 1)


@pytest.mark.parametrize("content", [b"", b"\0" * PAGE_BYTES, b"SWr1", b"\xff" * PAGE_BYTES])
def test_other_files_are_no_pages(content):
    assert read_page(content) is None


def test_a_damaged_page_is_read_as_far_as_it_goes():
    mine = page()
    mine.beat(waits=False, does="é" * PAGE_BYTES)
    mine.cells[8], mine.cells[12], mine.cells[16] = math.nan, math.inf, -1.0
    found = read_page(mine.content())
    assert found.actions == ()
    assert found.beat.does.startswith("éé")


def test_a_page_is_kept_but_not_through_a_link(tmp_path):
    mine = page(1)
    mine.beat(waits=False)
    keep(tmp_path, 1, mine.content())
    assert read_page((tmp_path / "ranks" / "rank1").read_bytes()).beat.rank == 1
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "ranks" / "rank2").symlink_to(victim)
    keep(tmp_path, 2, mine.content())
    keep(tmp_path / "nowhere", 2, mine.content())
    assert victim.read_text() == "mine"


@pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc")
def test_a_process_is_told_from_a_later_one_of_its_number():
    mine = page()
    mine.beat(waits=False)
    beat = read_page(mine.content()).beat
    assert is_the_same(beat)
    assert not is_the_same(beat._replace(begun=beat.begun + 1))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert not is_the_same(beat._replace(process=ended.pid))
    assert flight_record.space_of_processes()

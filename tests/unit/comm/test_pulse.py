"""The pulses of ranks: what a page says, and what is concluded from pages that stand still."""

import mmap
import os
from dataclasses import dataclass, field
from itertools import cycle
from typing import Any

import pytest

from shardwright import flight_record
from shardwright.comm import pulse
from shardwright.comm.pulse import Doing, OtherPage, PageAddress, Pulse, Pulses
from shardwright.flight_record import PAGE_BYTES, PAGE_VARIABLE, Beat, read_page, read_progress


@dataclass
class Page:
    """Of a rank that is made up."""

    beat: Beat
    kernel: Any = "S"
    asked: list[str] = field(default_factory=list)

    def read(self):
        return self.beat

    def has_ended(self):
        return not self.state()

    def state(self):
        return self.kernel if isinstance(self.kernel, str) else next(self.kernel)

    def stack(self):
        return "its stack now"


@pytest.fixture
def clock(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now[0])
    return now


def beats(clock, pages, *, for_s, waits=True, rank=0, told=None):
    """What rank 0 concludes at last, after it has looked regularly for some seconds."""
    pulses = Pulses(rank, pages, [].append if told is None else told.append)
    found = None
    for _ in range(round(for_s / 0.5) + 1):
        clock[0] += 0.5
        found = pulses.look(waits=waits) or found
    return found


def at(seconds, *, rank=1, waits=False):
    return Beat(rank, 4242, waits, seconds, "in step 3, forward of microbatch 1 on stage 0", "  train.py:7")


def test_a_page_says_what_its_rank_has_written():
    mine = Pulse(3)
    if not mine.address.host:
        pytest.skip("no pages here")
    mine.page.beat(
        waits=True, does="in step 2, at train.py:8", stack="  a.py:1 in f\n  b.py:2 in g", at_s=5.0
    )
    page = OtherPage(3, mine.address)
    expected = Beat(3, os.getpid(), True, 5.0, "in step 2, at train.py:8", "  a.py:1 in f\n  b.py:2 in g")
    assert page.read()[:6] == expected[:6]
    assert page.state() in "RS"
    mine.page.beat(waits=False, does="é" * 5000)
    assert page.read().does.startswith("éé")
    mine.rest()
    mine.rest()
    assert page.read().at_s == float("inf")


def test_pages_of_other_hosts_and_of_other_processes_are_left_alone():
    mine = Pulse(0)
    if not mine.address.host:
        pytest.skip("no pages here")
    elsewhere = mine.address._replace(host="another")
    ended = mine.address._replace(process=2**22 + 1)
    nowhere = PageAddress("", 0, 0, 0)
    assert not mine.others([mine.address, elsewhere, ended, nowhere, mine.address])  # the last is of rank 0


def test_a_stopped_rank_ends_the_run_once_somebody_waits_for_it(clock):
    page = Page(at(1000.0), kernel="T")
    assert beats(clock, {1: page}, for_s=3.0) is None
    clock[0] = 1000.0
    assert beats(clock, {1: page}, for_s=10, waits=False) is None
    clock[0] = 1000.0
    told = []
    rank, why = beats(clock, {1: page}, for_s=10, told=told)
    assert rank == 1
    assert why.startswith(
        "rank 1 hangs: a signal (SIGSTOP, or the terminal's) has stopped its process 4242 for "
    )
    assert "forward of microbatch 1 on stage 0" in why
    assert "train.py:7" in told[0]


def test_a_process_that_is_stopped_now_and_then_goes_on(clock):
    """As under cpulimit, while C code holds the interpreter."""
    page = Page(at(1000.0), kernel=cycle("TR"))
    assert beats(clock, {1: page}, for_s=10) is None


def test_only_the_first_of_those_that_wait_speaks(clock):
    stopped = Page(at(1000.0), kernel="T")
    waiting = Page(at(float("inf"), rank=0, waits=True))
    assert beats(clock, {0: waiting, 1: stopped}, for_s=10, rank=2) is None


@pytest.mark.parametrize("kernel", ["t", "Z", ""])
def test_a_debugger_and_an_end_are_nobody_s_business_here(clock, kernel):
    told = []
    assert beats(clock, {1: Page(at(1000.0), kernel=kernel)}, for_s=10, told=told) is None
    assert not told


def test_a_rank_that_runs_no_python_is_named_once_and_waited_for(clock):
    told = []
    assert beats(clock, {1: Page(at(1000.0), kernel="R")}, for_s=20, told=told) is None
    (text,) = told
    assert text.startswith("rank 1 has not run Python for ")
    assert text.endswith("its stack now")


def test_silent_ranks_are_asked_one_at_a_look(clock):
    told = []
    pages = {rank: Page(at(1000.0, rank=rank), kernel="R") for rank in (1, 2, 3)}
    beats(clock, pages, for_s=4, told=told)
    assert 0 < len(told) < 3
    beats(clock, pages, for_s=20, told=told)
    assert len(told) >= 3


def test_a_rank_that_goes_on_is_not_asked_for_its_stack(clock):
    """The signal would end one that has unregistered it meanwhile."""
    told, page = [], Page(at(1000.0), kernel="R")
    later = iter([page.beat, at(1e9)])
    page.read = lambda: next(later)
    pulses = Pulses(0, {1: page}, told.append)
    while not told:
        clock[0] += 0.5
        pulses.look(waits=True)
    assert told[0].endswith("train.py:7")


def test_a_rank_that_was_itself_held_up_does_not_judge_others_by_that(clock):
    page = Page(at(1000.0), kernel="T")
    pulses = Pulses(0, {1: page}, [].append)
    for _ in range(5):
        clock[0] += 20.0
        assert pulses.look(waits=True) is None


def killed(life):
    """The page of a rank that was killed: this process still has the memory."""
    record = flight_record.Page(mmap.mmap(-1, PAGE_BYTES), 0)
    record.beat(waits=False)
    record.progress(100 + life, has_saved=False)
    page = Page(at(1000.0), kernel="")
    page.content = record.content
    return page


def test_a_page_is_kept_in_the_run_folder_beside_that_of_the_life_before(tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "recorded_collectives", lambda: b'{"entries": []}')
    for life in range(2):
        mine = Pulse(1)
        mine.keep_of_failure({})  # no folder yet
        mine.keep_in(tmp_path / "nowhere", world_size=3)
        mine.keep_in(tmp_path, world_size=3)
        mine.page.progress(life, has_saved=False)
        mine.keep_of_failure({0: killed(life), 2: Page(at(1000.0), kernel="S")})
        mine.rest("has come to its end")
    lives = {
        path.name: read_page(path.read_bytes())
        for path in (tmp_path / "ranks").glob("rank1*")
        if path.suffix != ".json"
    }
    assert {name: (life.steps, life.beat.does) for name, life in lives.items()} == {
        "rank1": (1, "has come to its end"),
        "rank1.before": (0, "has come to its end"),
    }
    assert (tmp_path / "ranks" / "rank1.collectives.json").read_text() == '{"entries": []}'


def test_the_first_rank_removes_pages_of_ranks_that_there_are_no_more(tmp_path):
    (tmp_path / "ranks").mkdir()
    for name in ("rank1", "rank2", "rank17", "rank2.before"):
        (tmp_path / "ranks" / name).touch()
    for rank in (1, 0):
        mine = Pulse(rank)
        mine.keep_in(tmp_path, world_size=2)
        mine.rest()
    assert {path.name for path in (tmp_path / "ranks").iterdir()} == {"rank0", "rank1", "rank2.before"}


def test_the_file_of_the_launcher_is_the_page(tmp_path, monkeypatch):
    monkeypatch.setattr(pulse, "_given_file", "")
    monkeypatch.setenv(PAGE_VARIABLE, str(tmp_path / "progress0"))
    mine = Pulse(0)
    mine.page.progress(12, has_saved=True)
    assert read_progress((tmp_path / "progress0").read_bytes()) == (12, True)
    assert PAGE_VARIABLE not in os.environ
    mine.rest()


def test_a_process_that_stood_still_knows_it(monkeypatch):
    """Its thread sleeps half a second at a time; a longer sleep was none of its own."""
    now_s, waits = [0.0], iter([0.5, 2.6, 0.9])
    monkeypatch.setattr(pulse.time, "monotonic", lambda: now_s[0])
    mine = Pulse(0)

    class Ended:
        def wait(self, seconds):
            now_s[0] += (passed := next(waits, 0.0))
            return not passed

        def set(self):
            pass

    mine._ended = Ended()
    mine.begin(lambda: Doing(False, "", ""))
    mine._thread.join()
    assert mine.held_up_s == pytest.approx(2.1)
    mine.rest()

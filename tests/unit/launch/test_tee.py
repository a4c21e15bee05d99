"""The tee: whole lines, one prefix, tracebacks held back; with a clock that the test moves."""

import io
import os

import pytest

from shardwright.launch import worker_output as tee_module
from shardwright.launch.worker_output import Tee


class Clock:
    now_s = 100.0

    def monotonic(self):
        return self.now_s


class Stage:
    """A tee between two pipes."""

    def __init__(self, *, holds_back=True):
        self.read_fd, self.write_fd = os.pipe()
        self.shown_fd, self.console_fd = os.pipe()
        os.set_blocking(self.shown_fd, False)
        self.log = io.BytesIO()
        self.tee = Tee(
            self.read_fd, console_fd=self.console_fd, prefix=b"[rank 1] ", log=self.log, holds_back=holds_back
        )

    def write(self, text):
        os.write(self.write_fd, text.encode())
        self.tee.copy()

    def shown(self):
        try:
            return os.read(self.shown_fd, 65536).decode()
        except BlockingIOError:
            return ""

    def close(self):
        for descriptor in (self.read_fd, self.write_fd, self.shown_fd, self.console_fd):
            os.close(descriptor)


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(tee_module, "time", clock)
    return clock


@pytest.fixture
def stage(clock):
    stage = Stage()
    yield stage
    stage.close()


def test_of_a_progress_bar_one_state_in_ten_seconds_is_a_line_and_the_last(stage, clock):
    """Each was one: tqdm through a pipe wrote ten lines a second, and codes that move a cursor."""
    for percent in range(30):
        stage.write(f"\r{percent}%\x1b[A")
        clock.now_s += 1.0
    stage.write("\r30%\n")
    stage.write("\r      \r\nend\n")
    assert stage.shown() == "".join(f"[rank 1] {each}\n" for each in ("0%", "10%", "20%", "30%", "end"))


def test_a_last_line_without_an_end_is_shown_at_the_end(stage):
    stage.write("no end")
    assert stage.shown() == ""
    stage.tee.finish()
    assert stage.shown() == "[rank 1] no end\n"


def test_a_traceback_is_held_back_and_shown_if_the_worker_lives_on(stage, clock):
    stage.write("before\nTraceback (most recent call last):\n  File 'a'\nValueError: boom\n")
    assert stage.shown() == "[rank 1] before\n"
    assert b"ValueError: boom" in stage.log.getvalue()
    clock.now_s += 4.9
    stage.tee.release_if_due()
    assert stage.shown() == ""
    clock.now_s += 0.1
    stage.tee.release_if_due()
    assert stage.shown().splitlines()[-1] == "[rank 1] ValueError: boom"
    stage.write("after\n")
    assert stage.shown() == "[rank 1] after\n"


def test_a_traceback_of_a_worker_that_died_is_left_to_the_report(stage):
    stage.write("Traceback (most recent call last):\nValueError: boom\n")
    stage.tee.discard_held()
    stage.tee.release()
    assert stage.shown() == ""
    assert "ValueError: boom" in stage.tee.tail


def test_output_goes_on_into_the_log_when_the_console_is_gone(stage):
    os.close(stage.shown_fd)
    stage.write("one\n")
    stage.write("two\n")
    assert stage.log.getvalue() == b"one\ntwo\n"
    stage.shown_fd = os.open(os.devnull, os.O_RDONLY)


@pytest.fixture
def terminal(clock, monkeypatch):
    """A tee whose console is a terminal of forty columns."""
    monkeypatch.setattr(tee_module.os, "isatty", lambda fd: True)
    monkeypatch.setenv("COLUMNS", "40")
    stage = Stage()
    yield stage
    stage.close()


CLEAR = "\r\x1b[K"


def test_a_line_that_is_updated_stays_one_on_a_terminal(terminal):
    """Each state of a progress bar was a line of its own."""
    terminal.write("step 1\r")
    terminal.write("\x1b[Kstep 2\r")
    assert terminal.shown() == f"{CLEAR}[rank 1] step 1\r{CLEAR}[rank 1] step 2\r"
    terminal.write("\x1b[Kdone\n")
    assert terminal.shown() == f"{CLEAR}[rank 1] done\n"


def test_a_terminal_may_be_narrower_than_the_name_of_a_rank(terminal, monkeypatch):
    """Bug: folding to no columns at all ended what copies the output."""
    monkeypatch.setenv("COLUMNS", "9")
    monkeypatch.setattr(tee_module, "_STDERR", terminal.tee._console_fd)
    terminal.write("words of a line\n")
    assert terminal.shown() == f"{CLEAR}[rank 1] words of a line\n"


def test_progress_is_folded_to_the_terminal(stage, monkeypatch):
    """A terminal broke it in the middle of a word; the log keeps the line, for grep."""
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr(tee_module, "_STDERR", stage.console_fd)
    monkeypatch.setattr(stage.tee, "_is_terminal", True)
    line = "step 5 | loss 0.9401 | 32.6 samples/s | bubble 23%\n"
    stage.write(line)
    shown = stage.shown().replace("\r\x1b[K", "")
    assert shown.splitlines() == ["[rank 1] step 5 | loss 0.9401 |", "           32.6 samples/s | bubble 23%"]
    assert stage.log.getvalue().decode() == line

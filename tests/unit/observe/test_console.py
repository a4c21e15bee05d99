"""Who prints what, where, and in which colours."""

import io

import pytest

from shardwright.observe import Console


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def plain() -> io.StringIO:
    return io.StringIO()


def test_a_phase_that_fails_does_not_claim_to_be_done(plain: io.StringIO, clock: Clock) -> None:
    phase = Console(stream=plain, environ={}, clock=clock).phase("tracing the model")
    phase.__enter__()
    clock.now += 75
    assert not phase.__exit__(ValueError, ValueError("no"), None), "the error goes on"
    assert plain.getvalue().splitlines()[-1] == "tracing the model: stopped after 1m15s"


@pytest.mark.parametrize(
    ("seconds_a_part", "parts"),
    [(1.0, []), (4.0, ["measuring units 3/6", "measuring units 6/6"])],
)
def test_a_log_gets_a_line_every_ten_seconds(
    plain: io.StringIO, clock: Clock, seconds_a_part: float, parts: list[str]
) -> None:
    """Bug: a part of `measuring units` every 2 s, of the 5 s that it takes."""
    with Console(stream=plain, environ={}, clock=clock).phase("measuring units") as phase:
        for done in range(1, 7):
            clock.now += seconds_a_part
            phase.update(done, total=6)
    took = "6.00 s" if not parts else "24.0 s"
    assert plain.getvalue().splitlines() == ["measuring units ...", *parts, f"measuring units: {took}"]


def test_parts_are_rewritten_in_place_on_a_terminal(clock: Clock) -> None:
    terminal = Terminal()
    console = Console(stream=terminal, environ={"NO_COLOR": "1"}, clock=clock)
    with console.phase("measuring units") as phase:
        phase.update(1, total=2)
        phase.update(2, total=2)
        console.line("something else")
        phase.update(2, total=2)
    assert terminal.getvalue() == (
        "measuring units ...\n"
        "measuring units 1/2"
        "\r\x1b[Kmeasuring units 2/2"
        "\r\x1b[Ksomething else\n"
        "measuring units 2/2"
        "\r\x1b[K"
    )


@pytest.mark.parametrize("environ", [{"CI": "true", "NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_no_control_characters_where_they_are_not_wanted(environ: dict[str, str], clock: Clock) -> None:
    terminal = Terminal()
    with Console(stream=terminal, environ=environ, clock=clock).phase("measuring units") as phase:
        clock.now += 12
        phase.update(1, total=2)
    assert terminal.getvalue() == "measuring units ...\nmeasuring units 1/2\nmeasuring units: 12.0 s\n"


@pytest.mark.parametrize(("value", "silent"), [("1", True), ("true", True), ("0", False), ("", False)])
def test_quiet(value: str, silent: bool, plain: io.StringIO) -> None:
    console = Console(stream=plain, environ={"SHARDWRIGHT_QUIET": value})
    console.line("step 1")
    assert (plain.getvalue() == "") is silent


def test_the_other_ranks_are_silent(clock: Clock) -> None:
    terminal = Terminal()
    console = Console(prints=False, stream=terminal, environ={}, clock=clock)
    with console.phase("measuring units") as phase:
        clock.now += 10
        phase.update(1, total=2)
        console.line("a")
        console.status("b")
    assert terminal.getvalue() == ""


def test_lines_fit_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is rewritten in place left its end behind at each update where it was too long."""
    monkeypatch.setenv("COLUMNS", "20")
    stream = Terminal()
    console = Console(stream=stream, environ={"NO_COLOR": "1"})
    console.line("step 5 | loss 0.94 | bubble 23%")
    console.rewrite("step 6 | loss 0.93 | bubble 23%")
    assert stream.getvalue() == "step 5 | loss 0.94 |\n  bubble 23%\nstep 6 | loss 0.93\r"

"""The console line that scripts grep for; who prints what, where, and in which colours."""

import io
from typing import Any

import pytest

from shardwright.observe import Console, Progress, StepRecord

GIB, MIB = 2**30, 2**20


class Run:
    """Feeds steps to a progress and keeps its lines."""

    def __init__(
        self,
        *,
        log_interval: int | None = 1,
        world_size: int = 1,
        total_steps: int | None = None,
        **environ: str,
    ) -> None:
        self.stream = io.StringIO()
        self.now = 1000.0
        self.progress = Progress(
            Console(stream=self.stream, environ=environ),
            log_interval=log_interval,
            world_size=world_size,
            total_steps=total_steps,
            clock=lambda: self.now,
        )

    def step(self, step: int, seconds: float = 1.0, *, wall_s: float | None = None, **fields: Any) -> None:
        self.now += seconds if wall_s is None else wall_s
        self.progress.step_done(StepRecord(step=step, seconds=seconds, **{"samples": 8, **fields}))

    @property
    def lines(self) -> list[str]:
        return self.stream.getvalue().splitlines()


def line_of(**fields: Any) -> str:
    run = Run(world_size=fields.pop("world_size", 1))
    run.step(fields.pop("step", 1), fields.pop("seconds", 1.0), **fields)
    [line] = run.lines
    return line


def test_the_line_of_the_documentation() -> None:
    run = Run(world_size=2, total_steps=144)
    run.step(119, 0.5)
    run.step(
        120,
        0.5,
        loss=3.21451,
        tokens=20_600,
        flops=18.4e12,
        memory_bytes=(2 * GIB, round(3.1 * GIB)),
        memory_limit_bytes=24 * GIB,
        bubble_measured=0.11,
    )
    assert run.lines[1:] == [
        "step 120 | loss 3.2145 | 41.2k tok/s | 18.4 TFLOP/s/rank | mem 3.1/24 GiB | bubble 11% | eta 00:12"
    ]


def test_what_is_not_known_is_left_out() -> None:
    assert line_of() == "step 1 | 8.00 samples/s"
    assert line_of(seconds=0.0, loss=1.0) == "step 1 | loss 1.0000"


@pytest.mark.parametrize(
    ("used", "limit", "text"),
    [
        ((3 * GIB,), None, "mem 3 GiB"),
        ((GIB // 2, 3 * GIB), 80 * GIB, "mem 3/80 GiB"),
        ((40 * MIB,), 6 * GIB, "mem 40/6144 MiB"),
        ((round(0.5 * GIB),), round(1.5 * GIB), "mem 0.5/1.5 GiB"),
    ],
)
def test_memory_is_that_of_the_fullest_rank(used: tuple[int, ...], limit: int | None, text: str) -> None:
    assert line_of(memory_bytes=used, memory_limit_bytes=limit).endswith(f" | {text}")


def test_first_step_alone_then_one_line_an_interval() -> None:
    run = Run(log_interval=10)
    for step in range(1, 26):
        run.step(step)
    assert [line.split(" |")[0] for line in run.lines] == ["step 1", "step 10", "step 20"]
    run.progress.flush()
    run.progress.flush()
    assert [line.split(" |")[0] for line in run.lines] == ["step 1", "step 10", "step 20", "step 25"]


def test_averages_over_the_interval() -> None:
    run = Run(log_interval=2)
    run.step(1, 60.0, loss=100.0)  # traces and plans: must not drag the next line down
    run.step(2, 9.0, loss=5.0)
    run.step(3, 1.0, loss=2.0, tokens=100, bubble_measured=0.1, memory_bytes=(2 * GIB,))
    run.step(4, 3.0, loss=4.0, tokens=500, bubble_measured=0.3, memory_bytes=(GIB,))
    assert run.lines[-1] == "step 4 | loss 3.0000 | 150 tok/s | mem 2 GiB | bubble 25%"


def test_without_an_interval_a_line_comes_each_ten_seconds() -> None:
    run = Run(log_interval=None)
    for step in range(1, 26):
        run.step(step)
    run.progress.flush()
    assert [line.split(" |")[0] for line in run.lines] == ["step 1", "step 11", "step 21", "step 25"]


def test_on_a_terminal_one_line_is_updated() -> None:
    run = Run(log_interval=None, SHARDWRIGHT_TERMINAL="1", NO_COLOR="1")
    for step in range(1, 8):
        run.step(step, 0.25)
    run.progress.flush()
    rate = " | 32.0 samples/s"
    assert run.stream.getvalue() == (f"step 1{rate}\nstep 3{rate}\r\x1b[Kstep 5{rate}\r\x1b[Kstep 7{rate}\r")


def test_a_batch_that_is_one_whole_has_no_rate_of_samples() -> None:
    """A graph had 0.00 samples/s."""
    assert line_of(samples=0) == "step 1"


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

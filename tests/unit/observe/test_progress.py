"""The console line that scripts grep for."""

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

"""The two steps that every run records: which ones, and how they come back from the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observe.plans import measured_as, simulation
from shardwright.errors import UsageError
from shardwright.observe import RunFolder
from shardwright.observe.recorded_steps import (
    ChosenSteps,
    RankMemoryAfter,
    RecordedStep,
    StepsFile,
    read_recorded_steps,
)


def recorded(step: int, *, start_s: float = 0.0, waited_s: float = 0.0) -> RecordedStep:
    events = measured_as(simulation(), start_s=start_s, waited_s=waited_s)
    return RecordedStep.of(step, 12.5, events, [RankMemoryAfter(300, 1000), RankMemoryAfter(200, 900)])


class Run:
    """Two ranks that choose steps; the clock of the second one stands still."""

    def __init__(self, *, total: int | None = None) -> None:
        self.now = 0.0
        self.ranks = (ChosenSteps(total, clock=lambda: self.now), ChosenSteps(total, clock=lambda: 0.0))

    def gathered(self, first: int, count: int, *, step_s: float) -> list[int]:
        taken = []
        for number in range(first, first + count):
            wanted = {rank.wants(number) for rank in self.ranks}
            assert len(wanted) == 1, "ranks would wait for one another"
            if wanted.pop():
                taken.append(number)
            self.now += step_s
            for rank in self.ranks:
                rank.done(number)
            asked = self.ranks[0].asks_after(number)
            for rank in self.ranks:
                rank.asked_after(number, asked)
        return taken


@given(first=st.integers(1, 50), count=st.integers(1, 400), total=st.none() | st.integers(1, 500))
def test_the_last_one_taken_is_a_tenth_before_the_end_at_most(
    first: int, count: int, total: int | None
) -> None:
    taken = Run(total=total).gathered(first, count, step_s=5.0)
    assert taken[: min(3, count)] == list(range(first, first + min(3, count)))
    last, done = first + count - 1, taken[-1] - first + 1
    assert last - taken[-1] <= max(1, done // 10)
    if last == total:
        assert taken[-1] == last


def test_an_early_step_and_the_last_stay_in_the_file(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert read_recorded_steps(folder) == ()
    file = StepsFile(folder)
    kept = []
    for step in (11, 12, 13, 14, 20):
        file.add(recorded(step))
        kept.append([each.step for each in read_recorded_steps(folder)])
    assert kept == [[11], [12], [13], [13, 14], [13, 20]]
    early, last = read_recorded_steps(folder)
    assert last == recorded(20)
    assert early == recorded(13)
    assert last.memory[0].other_bytes == 700
    assert RankMemoryAfter().other_bytes is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version"),
        ({"steps": 3}, "steps"),
        ({"actions": [["0X0", 0, 1, 0, 0]]}, r"rank 0 has the action \['0X0'"),
        ({"actions": [["0F", 0, 1, 0, 0]]}, r"must be a name such as 0F3"),
        ({"actions": [["0F0", 2, 1, 0, 0]]}, r"rank 0 has the action \['0F0', 2"),
        ({"actions": [["0F0", 0, 5, 1e9, 0]]}, r"rank 0 has the action \['0F0', 0"),
        ({"actions": [["0F0", 0, 1]]}, r"actions"),
        ({"seconds": "long"}, "seconds"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = RunFolder(tmp_path)
    StepsFile(folder).add(recorded(3))
    document = json.loads(folder.steps_file.read_text())
    for name, value in change.items():
        step = document["steps"][0]
        place = step["ranks"][0] if name == "actions" else step if name == "seconds" else document
        place[name] = value
    folder.steps_file.write_text(json.dumps(document))
    with pytest.raises(UsageError, match=message):
        read_recorded_steps(folder)

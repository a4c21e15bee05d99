"""The trace file: what Perfetto and chrome://tracing ask for, and that nothing is missing.

Measured events and the idle share.

The two steps that every run records: which ones, and how they come back from the file.
"""

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from observe.plans import measured_as, simulation
from shardwright.cluster import Link
from shardwright.errors import UsageError
from shardwright.observe import MeasuredEvent, RunFolder, chrome_trace, idle_share
from shardwright.observe.recorded_steps import (
    ChosenSteps,
    RankMemoryAfter,
    RecordedStep,
    StepsFile,
    read_recorded_steps,
)
from shardwright.schedule import KINDS, build_schedule, place_stages, simulate, unit_costs

PREDICTED, MEASURED = 1, 2

FIELDS: dict[str, dict[str, type]] = {
    "M": {"name": str, "args": dict},
    "X": {"name": str, "cat": str, "tid": int, "ts": int, "dur": int, "args": dict},
    "C": {"name": str, "ts": int, "args": dict},
}


def check_schema(trace: dict[str, Any]) -> list[dict[str, Any]]:
    """Raises unless every event has exactly the fields of its phase; returns the events."""
    trace = json.loads(json.dumps(trace, allow_nan=False))
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    for event in trace["traceEvents"]:
        fields = {"ph": str, "pid": int, **FIELDS[event["ph"]]}
        assert set(event) - {"tid"} == set(fields) - {"tid"}, event
        assert all(type(event[name]) is kind for name, kind in fields.items()), event
        assert event.get("ts", 0) >= 0
        assert event.get("dur", 0) >= 0
        assert event.get("tid", 1) > 0
    times = [event["ts"] for event in trace["traceEvents"] if "ts" in event]
    assert times == sorted(times)
    phases = [event["ph"] for event in trace["traceEvents"]]
    assert "M" not in phases[phases.count("M") :], "names come first"
    return list(trace["traceEvents"])


def slices(events: list[dict[str, Any]], tid: int) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X" and event["tid"] == tid]


@given(
    kind=st.sampled_from(KINDS),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 5),
    waited_s=st.sampled_from([0.0, 0.25, 5.0, -1e-9]),
    speed=st.floats(1e-7, 3.0),
)
def test_every_action_once_in_order_and_apart(
    kind: str, num_ranks: int, num_microbatches: int, waited_s: float, speed: float
) -> None:
    ranks = place_stages(
        kind, num_ranks=num_ranks, stages_per_rank=2 if kind in ("interleaved_1f1b", "zb_v") else 1
    )
    simulated = simulation(kind, ranks, num_microbatches)
    measured = [
        MeasuredEvent(
            event.rank, event.action, 17 + event.start_s * speed, 17 + event.end_s * speed, waited_s
        )
        for event in simulated.events
    ]
    events = check_schema(chrome_trace(measured, simulation=simulated))
    expected = Counter((event.rank, str(event.action)) for event in simulated.events)
    for tid in (PREDICTED, MEASURED):
        own = slices(events, tid)
        assert Counter((e["pid"], e["name"]) for e in own if e["cat"] != "wait") == expected
        for pid in range(num_ranks):
            row = [e for e in own if e["pid"] == pid]
            for before, after in itertools.pairwise(row):
                assert before["ts"] + before["dur"] <= after["ts"], "Perfetto hides slices that overlap"


def test_rows_are_named_and_ordered() -> None:
    simulated = simulation("interleaved_1f1b", (0, 1, 0, 1), 2)
    trace = chrome_trace(measured_as(simulated), simulation=simulated, world_ranks=(4, 6))
    names = [event for event in check_schema(trace) if event["ph"] == "M"]
    assert [e["args"]["name"] for e in names if e["name"] == "process_name"] == [
        "rank 4 (stages 0, 2)",
        "rank 6 (stages 1, 3)",
    ]
    assert {e["pid"] for e in names} == {4, 6}
    order = {e["tid"]: e["args"]["sort_index"] for e in names if e["name"] == "thread_sort_index"}
    shown = {e["tid"]: e["args"]["name"] for e in names if e["name"] == "thread_name"}
    assert [shown[tid] for tid in sorted(order, key=order.__getitem__)] == ["predicted", "measured"]


def test_copies_to_the_host_have_a_thread_beside_their_rank() -> None:
    schedule = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=3).with_host_copies({0})
    predicted = simulate(schedule, unit_costs(2), host=Link(latency_s=0.5, bandwidth_Bps=1e9))
    measured = [*measured_as(predicted), *(MeasuredEvent(*event) for event in predicted.host_copies)]
    events = check_schema(chrome_trace(measured, simulation=predicted))
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names[0, 3] == "predicted, host copies"
    assert names[0, 4] == "measured, host copies"
    assert (1, 3) not in names  # the other rank copies nothing
    for thread in (3, 4):
        copies = slices(events, thread)
        assert [copy["name"] for copy in copies][:2] == ["0OFFLOAD0", "0LOAD0"]
        assert len(copies) == 6
        assert {copy["cat"] for copy in copies} == {"offload", "load"}
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in itertools.pairwise(copies))
    assert not [e for e in slices(events, MEASURED) if e["cat"] in ("offload", "load")]


@given(
    kind=st.sampled_from(KINDS),
    num_ranks=st.integers(1, 4),
    num_microbatches=st.integers(1, 6),
    start_s=st.floats(-1e3, 1e6),
)
def test_measured_as_predicted_gives_the_predicted_bubble(
    kind: str, num_ranks: int, num_microbatches: int, start_s: float
) -> None:
    stages_per_rank = 2 if kind in ("interleaved_1f1b", "zb_v") else 1
    ranks = place_stages(kind, num_ranks=num_ranks, stages_per_rank=stages_per_rank)
    simulated = simulation(kind, ranks, num_microbatches)
    measured = measured_as(simulated, start_s=start_s)
    busy_s = [sum(e.end_s - e.work_start_s for e in measured if e.rank == rank) for rank in range(num_ranks)]
    step_s = max(e.end_s for e in measured) - min(e.work_start_s for e in measured)
    assert idle_share(busy_s, step_s=step_s) == pytest.approx(simulated.bubble, abs=1e-6)


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

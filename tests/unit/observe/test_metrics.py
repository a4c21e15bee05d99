"""Names and numbers of ``metrics.jsonl``; files of records.

The page of names that others use, and what importing them costs.
"""

import json
import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.observe import JsonLines, Metric, MetricsLog, StepRecord, read_json_lines

FULL = StepRecord(
    step=120,
    seconds=0.5,
    loss=3.25,
    samples=16,
    tokens=4096,
    flops=2e12,
    bubble_measured=0.11,
    bubble_predicted=0.1,
    step_predicted_s=0.45,
    memory_bytes=(2**30, 3 * 2**30),
    memory_limit_bytes=24 * 2**30,
    learning_rate=1e-3,
    work_s=0.9,
    outside_s=0.03,
    update_s=0.02,
    skipped_updates=2,
)
BARE = StepRecord(step=1, seconds=2.0, samples=8)


def test_everything_that_is_known(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "metrics.jsonl", world_size=2, wall=lambda: 1_795_000_000.12345)
    log.append(FULL)
    log.append(BARE)
    log.close()
    first, second = read_json_lines(tmp_path / "metrics.jsonl")
    assert first == {
        "step": 120,
        "time/unix(s)": 1_795_000_000.123,
        "train/loss": 3.25,
        "train/learning_rate": 1e-3,
        "time/step(s)": 0.5,
        "time/step_predicted(s)": 0.45,
        "time/work(s)": 0.9,
        "time/outside_units(s)": 0.03,
        "time/update(s)": 0.02,
        "train/skipped(updates)": 2,
        "time/above_prediction(share)": pytest.approx(1 / 9),
        "throughput/samples(1/s)": 32.0,
        "throughput/tokens(1/s)": 8192.0,
        "throughput/compute(FLOP/s)": 4e12,
        "throughput/compute_per_rank(FLOP/s)": 2e12,
        "memory/peak(GiB)": 3.0,
        "memory/peak_by_rank(GiB)": [1.0, 3.0],
        "memory/limit(GiB)": 24.0,
        "pipeline/bubble(share)": 0.11,
        "pipeline/bubble_predicted(share)": 0.1,
    }
    assert set(second) == {"step", "time/unix(s)", "time/step(s)", "throughput/samples(1/s)"}


@pytest.mark.parametrize("name", list(Metric))
def test_names_are_group_name_unit(name: str) -> None:
    assert re.fullmatch(
        r"(train|time|throughput|memory|communication|pipeline|goodput|ranks)/[a-z_]+(\([A-Za-z1/]+\))?", name
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "records.jsonl"


def test_one_line_a_record_there_at_once(path: Path) -> None:
    lines = JsonLines(path)
    assert not path.exists()
    lines.append({"a": 1})
    assert path.read_text() == '{"a": 1}\n'
    lines.append({"b": [1, (2, 3)], "c": {"d": None}})
    assert path.read_text().splitlines()[1] == '{"b": [1, [2, 3]], "c": {"d": null}}'
    lines.close()
    lines.close()
    lines.append({"again": True})
    lines.close()
    assert len(read_json_lines(path)) == 3


def test_numbers_that_json_does_not_have(path: Path) -> None:
    lines = JsonLines(path)
    lines.append({"loss": math.nan, "deep": [math.inf, {"x": -math.inf}]})
    lines.close()
    [record] = read_json_lines(path)
    assert record == {"loss": "NaN", "deep": ["Infinity", {"x": "-Infinity"}]}
    assert math.isnan(float(record["loss"]))
    assert float(record["deep"][1]["x"]) == -math.inf
    json.loads(path.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_a_line_cut_off_by_a_killed_process_spoils_no_other(path: Path) -> None:
    path.write_text('{"step": 1}\n{"step": 2, "lo')
    lines = JsonLines(path)
    lines.append({"step": 3})
    lines.close()
    assert read_json_lines(path) == [{"step": 1}, {"step": 3}]


# No reader takes more than 30 digits.
numbers = st.integers(1 - 10**30, 10**30 - 1) | st.floats(allow_nan=False, allow_infinity=False)
json_values = st.recursive(
    st.none() | st.booleans() | numbers | st.text(),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.text(), children, max_size=3),
    max_leaves=8,
)


@settings(max_examples=30)
@given(st.lists(st.dictionaries(st.text(), json_values, max_size=3), max_size=4))
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]]) -> None:
    path = tmp_path_factory.getbasetemp() / "records.jsonl"
    path.write_bytes(b"")
    lines = JsonLines(path)
    for record in records:
        lines.append(record)
    lines.close()
    assert read_json_lines(path) == records

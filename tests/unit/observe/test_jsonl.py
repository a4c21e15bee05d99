"""Files of records."""

import json
import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.observe import JsonLines, read_json_lines


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

"""What a report tells of a run besides its steps: its command, when it began."""

import json
from pathlib import Path

from shardwright.observe.report.facts import read_facts
from shardwright.observe.run_folder import RunFolder


def facts_of(tmp_path: Path, **fields: object):
    document = {"version": 1, "script": "train.py", "state": "finished", "begun_s": 1.0, **fields}
    (tmp_path / "run.json").write_text(json.dumps(document))
    return read_facts(RunFolder(tmp_path))


def test_a_command_without_its_secrets(tmp_path: Path) -> None:
    found = facts_of(tmp_path, command="shardwright run -n 2 train.py --hub_token=abc --seed 1")
    assert found.command == "shardwright run -n 2 train.py --hub_token=(not shown) --seed 1"
    assert found.begun == "1970-01-01 00:00 UTC"


def test_a_time_that_no_calendar_has_tells_nothing(tmp_path: Path) -> None:
    assert facts_of(tmp_path, begun_s=1e30).begun == ""

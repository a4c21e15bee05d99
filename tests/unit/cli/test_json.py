"""``--json`` of every command is for programs: no size, no time and no table in words."""

import json
import re

import pytest
from checkpoint.checkpoints import save
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call

SENTENCES = {
    "why",
    "verdict",
    "notes",
    "remark",
    "problem",
    "problems",
    "assumption",
    "sentences",
    "source",
    "next",
    "text",
}
"""Keys whose values are for people, beside numbers that say the same."""

NAMES = {"name", "sample"}
_FORMATTED = re.compile(r"(?<!\w)[\d.,]*\d ?(us|ms|s|[kKMGT]i?B|GB/s|tok/s|FLOP/s)\b|\d%|\n|  ")


def _formatted(value, key=""):
    """Texts that hold a number with its unit, or a table."""
    if isinstance(value, dict):
        found = [each for name, inner in value.items() for each in _formatted(inner, name)]
    elif isinstance(value, list):
        found = [each for inner in value for each in _formatted(inner, key)]
    else:
        is_text = isinstance(value, str) and key not in SENTENCES | NAMES
        found = [(key, value)] if is_text and _FORMATTED.search(value) else []
    return found


@pytest.mark.parametrize(
    "words",
    [
        "show plan.json",
        "compare plan.json plan.json",
        "explain run",
        "report run",
        "show run",
        "runs .",
        "doctor",
        "schedule 1f1b -n 2 -m 2",
        "catalogue p5.48xlarge*2",
        "catalogue",
        "search gpt2-1.5b dgx-h100 -b 8",
        "search gpt2-1.5b dgx-h100 -b 8 --tokens 1e9",
        "ckpt ls run",
        "ckpt verify run",
    ],
)
def test_documents_have_numbers(capsys, tmp_path, monkeypatch, words):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)
    plan = planned()
    run_folder(tmp_path / "run", plan)
    plan.write(tmp_path / "plan.json")
    save(tmp_path / "run" / "checkpoints", 10)
    code, out, err = call(capsys, *words.split(), "--json")
    assert code == 0, err
    assert _formatted(json.loads(out)) == []

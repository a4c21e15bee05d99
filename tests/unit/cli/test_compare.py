"""``shardwright compare``."""

import json

import pytest
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call


@pytest.fixture
def runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_folder(tmp_path / "slow", planned())
    run_folder(tmp_path / "fast", planned(microbatches=8, forward_s=0.025), steps=5)
    return tmp_path


def test_two_runs_as_a_table(capsys, runs):
    code, out, err = call(capsys, "compare", "slow", "fast")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "fast is 2.09 times as fast as slow: 821 ms against 1.72 s a step."
    assert lines[1].split() == ["slow", "fast", "change"]
    assert any(line.startswith("loss at step 3 ") for line in lines)
    assert any(line.startswith("  plan: schedule.microbatches: 4 -> 8") for line in lines)
    assert max(map(len, lines)) <= 80


def test_as_json(capsys, runs):
    code, out, _ = call(capsys, "compare", "slow", "fast", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["names"] == ["slow", "fast"]
    figures = {row["name"]: row for row in found["figures"]}
    assert figures["steps"]["first"] == 3
    assert figures["steps"]["second"] == 5
    step = figures["step"]
    assert step["change"] == pytest.approx(step["second"] / step["first"] - 1)
    assert [part["kind"] for part in found["parts"]][:2] == ["forward", "backward"]
    assert found["parts"][0]["first_s"] == pytest.approx(0.4, rel=0.02)
    assert found["parts"][0]["second_s"] == pytest.approx(0.2, rel=0.02)


def test_runs_of_different_models_are_not_ranked(capsys, runs):
    """The smaller one was "14.77 times as fast"."""
    other = planned(forward_s=0.005)
    model = other.model.model_copy(update={"fingerprint": "beef"})
    run_folder(runs / "small", other.model_copy(update={"model": model}))
    _, out, _ = call(capsys, "compare", "slow", "small", "--json")
    assert "They trained different models, so their speed does not compare" in json.loads(out)["verdict"]

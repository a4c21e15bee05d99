"""``shardwright explain``."""

import json
import re

import pytest
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call


def test_a_plan_is_explained(capsys, tmp_path):
    plan = planned(ranks=4, recompute_s=0.05)
    plan.write(tmp_path / "plan.json")
    code, out, err = call(capsys, "explain", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert out.startswith("plan: 1f1b, 4 microbatches, 4 stages on 4 ranks; predicted step")
    assert "  The times of the units were measured.\n" in out
    for part in ("forward", "backward", "recomputation", "bubble", "messages: latency", "sums over replicas"):
        assert re.search(rf"^  {part} +[\d.]+ (s|ms|us) +[\d.]+% +█+$", out, re.MULTILINE), part
    assert re.search(r"^  predicted step +[\d.]+ s +100.0%", out, re.MULTILINE)
    assert "limit 9.8 KiB" in out
    assert re.search(r"^  10% faster compute +[\d.]+ s +-\d.\d%$", out, re.MULTILINE)
    assert re.search(r"^  twice the bandwidth", out, re.MULTILINE)
    assert "8 microbatches" not in out
    assert "12.5% slower, with 4.0 KiB" in out
    assert "measured beside" not in out


def test_a_run_is_measured_beside_its_plan(capsys, tmp_path):
    _, out, _ = call(capsys, "explain", run_folder(tmp_path / "run", planned()))
    assert re.search(r"^  step time .* \+10.0%$", out, re.MULTILINE)
    assert re.search(r"^  forward +400 ms +400 ms +[+-]0.0%$", out, re.MULTILINE)


def test_what_is_not_known_is_said(capsys, tmp_path):
    by_hand = planned().model_copy(update={"prediction": None})
    by_hand.write(tmp_path / "plan.json")
    code, out, _ = call(capsys, "explain", tmp_path / "plan.json")
    assert code == 0
    assert "The plan predicts nothing" in out
    assert "what the step is spent on" not in out


def test_as_json(capsys, tmp_path):
    plan = planned()
    _, out, _ = call(capsys, "explain", run_folder(tmp_path / "run", plan), "--json")
    document = json.loads(out)
    parts = document["predicted"]["waterfall"]["parts"]
    assert sum(part["seconds"] for part in parts) == pytest.approx(plan.prediction.step_s, rel=1e-9)
    assert [row["name"] for row in document["sensitivities"]][:2] == [
        "10% faster compute",
        "twice the bandwidth",
    ]
    assert "timeline" not in document["predicted"]

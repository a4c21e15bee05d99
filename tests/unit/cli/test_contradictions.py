"""Options that contradict one another, or would do nothing, are refused."""

import pytest
from planned import planned

from cli.calling import call
from shardwright.cluster import Cluster, Device, Link
from shardwright.planner.profiles import MeasuredProfile

LINK = Link(latency_s=1e-5, bandwidth_Bps=1e9)


@pytest.fixture
def profile(tmp_path):
    cluster = Cluster(
        device=Device(name="cpu"), ranks_per_node=2, cores_per_node=2, intra_node=LINK, inter_node=LINK
    )
    found = MeasuredProfile(fingerprint="f", costs={}, cluster=cluster, num_ranks=2, when="now")
    found.write(tmp_path / "profile.json")
    return str(tmp_path / "profile.json")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "bfloat16"], "--dtype is bfloat16, but only --cluster has rates"),
        (["--cluster", "p4d.24xlarge", "--dtype", "int8"], "--dtype is 'int8', but it must be one of"),
        (
            ["--cluster", "p4d.24xlarge", "--dtype", "float32", "--set", "bf16=true"],
            "--dtype is float32, but the settings have bf16",
        ),
    ],
)
def test_options_without_use_are_refused(capsys, words, message):
    code, _, err = call(capsys, "plan", "m.py:build", "-n", "2", *words)
    assert code == 2
    assert message in err


@pytest.mark.parametrize("words", ["explain {long}"])
def test_schedules_that_would_take_hours_are_refused(capsys, tmp_path, words):
    plan, long = tmp_path / "plan.json", tmp_path / "long.json"
    planned(ranks=40).write(plan)
    long.write_text(plan.read_text().replace('"microbatches": 4', '"microbatches": 90000', 1))
    code, _, err = call(capsys, *words.format(plan=plan, long=long).split())
    assert code != 0
    assert "90000 microbatches on 40 stages are 7200000 actions" in err
    assert "Take at most 62500 microbatches" in err


@pytest.mark.parametrize(
    "words", [["profile", "m.py:build", "-o", "{out}"], ["probe", "{out}"], ["probe", "--cluster", "{out}"]]
)
def test_where_files_go_is_looked_at_before_anything_is_measured(capsys, tmp_path, words, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.py").write_text("from torch import nn\ndef build(): return nn.Linear(2, 2), ()\n")
    for out, message in (
        ("nowhere/x.json", "there is no folder"),
        (".", ". cannot be written: it is a folder"),
    ):
        code, _, err = call(capsys, *(word.format(out=out) for word in words))
        assert code == 2
        assert message in err

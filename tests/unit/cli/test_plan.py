"""``shardwright plan``."""

import json

import pytest
from observe.plans import two_stage_plan

from cli.calling import call
from shardwright.plan import Plan


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two_stage_plan().write(tmp_path / "run" / "plan.json")
    changes = {"schedule": {"kind": "gpipe", "microbatches": 3}}
    Plan.model_validate({**two_stage_plan().model_dump(), **changes}).write(tmp_path / "gpipe.json")
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.json").write_text("{")
    return tmp_path


def test_show_has_stages_memory_and_reasons(capsys, folder):
    code, out, err = call(capsys, "show", "run")
    assert (code, err) == (0, "")
    assert "plan: 1f1b, 3 microbatches, 2 stages on 2 ranks, 2 replicas; predicted step 1.20 s" in out
    assert "  0      0     embed  2.0 KiB     100 ms   200 ms    0 B\n" in out
    assert "  1f1b keeps fewer microbatches.\n" in out
    assert "model f: 10 parameters, 2 units" in out
    assert "  1     800 B       800 B      1.6 KiB    100 B        0 B   3.2 KiB\n" in out


def test_a_terminal_gets_folded_lines(capsys, folder, monkeypatch):
    """Tables and reasons were broken by the terminal in the middle of words, and went on at its edge."""
    monkeypatch.setenv("COLUMNS", "60")
    whole = call(capsys, "show", "run")[1]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    out = call(capsys, "show", "run")[1]
    assert max(map(len, whole.splitlines())) > 60 >= max(map(len, out.splitlines()))
    assert out.split() == whole.split()
    found = call(capsys, "show", "run", "--json")[1]
    assert Plan.parse(found) == two_stage_plan()


def test_diff_ends_as_diff_does(capsys, folder):
    assert call(capsys, "compare", "run", "run/plan.json") == (0, "the plans decide alike\n", "")
    code, out, _ = call(capsys, "compare", "run", "gpipe.json")
    assert code == 1
    assert out == "the plans differ\n  schedule.kind  1f1b -> gpipe\n"
    code, out, _ = call(capsys, "compare", "run", "gpipe.json", "--json")
    assert code == 1
    assert json.loads(out) == {
        "alike": False,
        "decision": [{"what": "schedule.kind", "before": "1f1b", "after": "gpipe"}],
        "prediction": [],
    }


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.json", "plan file gone.json cannot be read: No such file or directory"),
        ("broken.json", "is no JSON"),
    ],
)
def test_what_is_no_plan_is_a_usage_error(capsys, folder, path, message):
    for words in (("show", path), ("compare", "run", path)):
        code, out, err = call(capsys, *words)
        assert (code, out) == (2, "")
        assert message in err


def test_settings_reach_the_plan(capsys):
    code, out, _ = call(capsys, "plan", "-n", 2, "cli.models:build", "--set", "microbatches=4", "--json")
    assert code == 0
    assert Plan.parse(out).schedule.microbatches == 4
    code, out, _ = call(
        capsys, "plan", "cli.models:build_by_name", "-n", 2, "--set", "pipeline=gpipe", "--json"
    )
    assert Plan.parse(out).schedule.kind == "gpipe"


MACHINE = """
cluster_version: 1
nodes:
- name: large
  number: 8
  accelerators: 8
  accelerator: {name: large, family: "", memory: SIZE, memory_Bps: 1.5e12, flops_per_s: {float32: 3e14}}
  link_Bps: 250e9
  network_Bps: 100e9
"""


def test_a_model_that_this_machine_could_not_hold(capsys, tmp_path):
    (tmp_path / "machine.yaml").write_text(MACHINE.replace("SIZE", "4TiB"))
    (tmp_path / "settings.yaml").write_text("microbatches: 8\npipeline: 1f1b\n")
    options = ("--cluster", tmp_path / "machine.yaml", "--config", tmp_path / "settings.yaml")
    code, out, err = call(capsys, "plan", "cli.models:build_large", "-n", 64, *options, "--json")
    assert code == 0, err
    assert "no --cluster" not in err
    plan = Plan.parse(out)
    assert plan.prediction is not None
    assert sum(stage.parameter_bytes for stage in plan.prediction.stages) > 16 * 2**40
    assert max(memory.peak_bytes for memory in plan.prediction.memory) < 4 * 2**40


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("-n", "2", "--set", "microbatchs=2"), "Did you mean microbatches?"),
        (("-n", "3", "--set", "pipeline_parallel_degree=2"), "WORLD_SIZE(3)"),
        (("-n", "2", "--set", "plan=x.json"), "a plan is to be made"),
        (("-n", "2", "--set", "auto_partition=false", "--set", "default_partition=0"), "sw.partition"),
        (("-n", "2", "--config", "gone.yaml"), "--config gone.yaml cannot be read"),
        (("-n", "2", "--cluster", "gone.yaml"), "cluster file gone.yaml cannot be read"),
        (("-n", "2", "--cluster", "p4"), "there are no machines called 'p4'"),
        (("-n", "9", "--cluster", "p4d.24xlarge"), "p4d.24xlarge x 1 has 8 ranks"),
        (("-n", "2", "--machine", "a.yaml"), "Name the machines, or their file, by --cluster"),
        (
            ("-n", "2", "--cluster", "p3.16xlarge", "--dtype", "bfloat16"),
            "V100-16GB has no rate for bfloat16",
        ),
        (("-n", "2", "--profile", "gone.json"), "profile gone.json cannot be read"),
        (("-n", "2", "--verify", "2"), "run each with shardwright run --plan FILE"),
        (("-n", "2", "-o", "/proc/plan.json"), "--output /proc/plan.json cannot be written"),
        (("-n", "40"), "units to place"),
        ((), "--num-ranks"),
    ],
)
def test_wrong_options_of_make(capsys, words, message):
    code, out, err = call(capsys, "plan", "cli.models:build", *words)
    assert (code, out) == (2, "")
    assert message in err

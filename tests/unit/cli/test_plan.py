"""``shardwright plan``; ``shardwright explain``; ``shardwright trace``.

``shardwright schedule``: the picture.
"""

import json
import re

import pytest
from observe.plans import two_stage_plan
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call
from cli.models import Model
from shardwright.plan import Plan
from shardwright.schedule import KINDS


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    two_stage_plan().write(tmp_path / "run" / "plan.json")
    changes = {"schedule": {"kind": "gpipe", "microbatches": 3}}
    Plan.model_validate({**two_stage_plan().model_dump(), **changes}).write(tmp_path / "gpipe.json")
    (tmp_path / "empty").mkdir()
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


@pytest.mark.parametrize(
    ("settings", "of_parameters"),
    [
        ((), 2.0),
        (("optimizer_state=bf16",), 1.0),
        (("optimizer_state=8bit",), 2 * 65 / 64 / 4),
        (("offload_optimizer=true",), 0.0),
    ],
)
def test_plans_count_the_moments_where_they_are(capsys, settings, of_parameters):
    words = ["plan", "-n", 2, "cli.models:build", "--cluster", "p4d.24xlarge", "--json"]
    for setting in settings:
        words += ["--set", setting]
    code, out, _ = call(capsys, *words)
    assert code == 0
    for of_rank in json.loads(out)["prediction"]["memory"]:
        expected = pytest.approx(of_parameters * of_rank["parameters_bytes"], abs=2)
        assert of_rank["optimizer_bytes"] == expected


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
        (("-n", "9", "--cluster", "p4d.24xlarge"), "p4d.24xlarge x 1 has 8 ranks"),
        (("-n", "2", "--machine", "a.yaml"), "Name the machines, or their file, by --cluster"),
        (
            ("-n", "2", "--cluster", "p3.16xlarge", "--dtype", "bfloat16"),
            "V100-16GB has no rate for bfloat16",
        ),
        (("-n", "2", "--verify", "2"), "run each with shardwright run --plan FILE"),
        (("-n", "40"), "units to place"),
        ((), "--num-ranks"),
    ],
)
def test_wrong_options_of_make(capsys, words, message):
    code, out, err = call(capsys, "plan", "cli.models:build", *words)
    assert (code, out) == (2, "")
    assert message in err


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


def test_units_ties_and_what_feeds_what(capsys):
    code, out, err = call(capsys, "trace", "cli.models:build")
    assert code == 0
    assert err.startswith("building cli.models:build ...\n")  # a time follows where it takes long
    assert "tracing the model ...\n" in err
    num_parameters = sum(parameter.numel() for parameter in Model().parameters())
    assert out.startswith(f"6 units, {num_parameters:,} parameters; of a microbatch of 8: ")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line}
    # Two linear layers of 16 x 64, two operations each, for 8 sequences of 6.
    assert rows["blocks.0"][1:5] == ["Block", "8.3", "KiB", f"{2 * 2 * 16 * 64 * 48 / 1000:.1f}"]
    assert rows["embed"][-2:] == ["the", "next"]
    assert rows["blocks.0"][-2:] == ["blocks.1,", "blocks.3"]  # through an addition
    assert rows["head"][-2:] == ["the", "loss"]
    assert "tied: embed.weight = head.weight (3.1 KiB), used by embed, head" in out


def test_a_module_that_reads_values_is_one_unit(capsys):
    code, out, _ = call(capsys, "trace", "cli.models:build_reading", "--stages", 8)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines() if line[:1].isdigit()][1:] == [
        ["0", "Linear"],
        ["1", "Chooser"],
        ["2", "Linear"],
    ]


def test_a_model_without_a_loss_needs_one(capsys, tmp_path):
    (tmp_path / "m.py").write_text(
        "import torch\nclass M(torch.nn.Module):\n"
        "    def forward(self, x): return (x > 0,)\n"
        "def build(): return M(), torch.zeros(2)\n"
    )
    code, _, err = call(capsys, "trace", f"{tmp_path / 'm.py'}:build")
    assert code == 2
    assert "returns tuple without a tensor of floating-point numbers" in err


def test_the_picture_is_the_one_of_the_papers(capsys):
    code, out, err = call(capsys, "schedule", "1f1b", "-n", 2, "--microbatches", 3)
    assert (code, err) == (0, "")
    assert "rank 0 | F0 F1 .  .  B0=== F2 B1=== .  B2===\n" in out
    assert "rank 1 | .  F0 B0=== F1 B1=== F2 B2===\n" in out
    assert "step    12.0 s, of which each rank computes 9.00 s" in out
    assert "bubble  25.0% of the ranks' time (3.00 s a rank)\n" in out


@pytest.mark.parametrize("kind", KINDS)
def test_all_numbers_are_there_for_programs(capsys, kind):
    _, out, _ = call(capsys, "schedule", kind, "-n", 3, "-m", 9, "--json")
    found = json.loads(out)
    assert found["bubble_s"] > 0
    assert len(found["peak_activations"]) == 3
    assert len(found["actions"]) == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("1f1c",), "there is no schedule '1f1c'"),
        (("1f1b", "--stages-per-rank", "2"), "ask for interleaved_1f1b"),
        (("zb_v", "--stages-per-rank", "3"), "zb_v runs exactly 2 stages"),
        (("1f1b", "--send", "1"), "Those of a model's own: shardwright explain PLAN"),
    ],
)
def test_what_cannot_be_drawn_is_a_usage_error(capsys, words, message):
    code, out, err = call(capsys, "schedule", *words)
    assert (code, out) == (2, "")
    assert message in err

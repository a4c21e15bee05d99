"""A command line that cannot be read: what was asked, what is true, what to do; within 80 columns.

Options that contradict one another, or would do nothing, are refused.
"""

import sys
from pathlib import Path

import pytest
from planned import planned

from cli.calling import Terminal, call
from shardwright.cli import COMMANDS
from shardwright.cli.commands.run import _where
from shardwright.cluster import Cluster, Device, Link
from shardwright.planner.profiles import MeasuredProfile

TASK = "gpt2-1.5b p4d.24xlarge --batch 512"


@pytest.fixture
def refused(monkeypatch, capsys):
    """Runs words that are refused; returns what a terminal of 80 columns shows, and the same in one line."""
    monkeypatch.setenv("COLUMNS", "80")

    def run(*words):
        terminal = Terminal()
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stderr", terminal)
            code, out, _ = call(capsys, *words)
        lines = terminal.getvalue().splitlines()
        assert (code, out) == (2, "")
        assert max(map(len, lines)) <= 80
        assert lines[0].startswith(("UsageError: ", "ConfigError: ", "PlanError: "))
        return " ".join(" ".join(lines).split()).removeprefix("UsageError: ")

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --nnode 2 train.py", "run has no option --nnode. Did you mean --nnodes? All of them: "),
        ("run --lr 3 train.py", "run has no option --lr. All of them: shardwright run --help"),
        ("--verison", "there is no option --verison. Did you mean --version? All of them: "),
        ("run -x train.py", "run has no option -x. All of them: shardwright run --help"),
        ("run --gpus 2 train.py", "run has no option --gpus. Write -n NUMBER"),
        (f"search {TASK} --seq 128", "search has no option --seq. Write --sequence NUMBER"),
        ("plan model.py:build -n 2 --seq 128", "the batch says that model.py:build returns."),
        ("export runs/train", "shardwright ckpt export RUN"),
        (
            "plan make model.py:build -n 2",
            "plan has no command make. plan itself makes one:",
        ),
        ("diff a.json b.json", "shardwright compare PLAN OTHER_PLAN"),
        ("why_not llama3-8b dgx-h100 tensor=8", "--why-not tensor=8,pipeline=4"),
        ("simulate plan.json --slow 1=2", "shardwright explain PLAN"),
        ("schedule 1f1b --ranks 3", "schedule has no option --ranks. Write -n NUMBER"),
        ("-n 2 train.py", "-n stands before a command. Put it behind: shardwright run -n 2 train.py"),
        ("run --microbatches 4 train.py", "Write --set microbatches=VALUE, for it is a setting."),
        (f"search {TASK} --tensor 8", "search has no option --tensor. Write --pin tensor=VALUE"),
        (f"search {TASK} --recompute full", "--pin recompute=VALUE, one of none, selective, full"),
        (f"search {TASK} --pin expert_parallel_degree=4", "Pin context as well: context=1, expert=4; or"),
        ("run -n two train.py", "--num-ranks is 'two', but it must be a whole number."),
        ("run -n 0 train.py", "--num-ranks is '0', but it must be at least 1."),
        ("run --device gpu train.py", "--device: 'gpu' is not one of 'auto', 'cpu'."),
        ("run -np 2 train.py", "must be a whole number. Write -n 2; without it, a rank for each GPU."),
        ("run --standalone train.py", "run has no option --standalone, which is torchrun's. Leave it out;"),
        ("resume train.py", "To continue a run: shardwright run --resume train.py"),
        ("search llama3-8b 8xh100 -b 64", "is an accelerator, and machines have several. Name these: p5.48"),
        ("run -n", "-n needs a value behind it: -n VALUE"),
        (
            "watch runs/train",
            "there is no command watch. What each rank does: shardwright status NAME --follow;",
        ),
        ("schedule check a.csv", "schedule has no command check. To check one: shardwright.schedule"),
        ("compare a b -o page.html", "compare has no option -o. Two pages side by side: shardwright report"),
        ("runs --json=yes", "--json takes no value. Write it alone."),
        ("runs a b", "runs takes DIR, and b is left over. Leave it out, or put quotes"),
        ("rnu train.py", "there is no command rnu. Did you mean run? All of them: shardwright --help"),
        ("train.py", "there is no command train.py. To run a script: shardwright run -n 2 train.py"),
        ("ckpt list a", "ckpt has no command list. Did you mean ls? All of them: shardwright ckpt --help"),
        ("search gpt2-1.5b", "search needs MACHINES: such as p4d.24xlarge*4, or"),
        ("search gpt2-1.5b p4d.24xlarge", "search needs --batch: samples of a step, over all"),
    ],
)
def test_a_command_line_is_refused_in_our_words(refused, words, message):
    assert message in refused(*words.split())


def _commands():
    for command in COMMANDS:
        if command.is_group:
            yield from ((command.name, each.name) for each in command.load().registered_commands)
        else:
            yield (command.name,)


@pytest.mark.parametrize("words", list(_commands()), ids=" ".join)
def test_what_is_missing_comes_with_an_example(refused, words):
    """Commands that need nothing are given too much."""
    needs_nothing = words in {("runs",), ("doctor",), ("catalogue",), ("probe",)}
    if needs_nothing:
        assert "is left over" in refused(*words, "a", "b")
        return
    said = refused(*words)
    assert said.startswith(f"{' '.join(words)} needs ")
    assert f"For example: shardwright {' '.join(words)} " in said or said.endswith("--help")


@pytest.mark.parametrize(
    ("option", "content", "message"),
    [
        ("--config", '{"plan_version": 2}', "this is a plan, and no settings. Follow it with --plan a.json"),
        ("--config", "pipeline:\n\tgpipe\n", "cannot start any token (a tab? Indent with spaces)."),
        ("--plan", '{"microbatches": 4}', "has no plan_version, so it is no plan. Plans are in run folders."),
        ("--plan", '{"plan_version": 2,}', "Mend that line (a comma too many?), or make the plan anew."),
    ],
)
def test_files_that_are_something_else(refused, tmp_path, monkeypatch, option, content, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    (tmp_path / "a.json").write_text(content)
    if content.startswith("pipeline"):
        (tmp_path / "a.json").rename("a.yaml")
    name = next(path.name for path in tmp_path.iterdir() if path.stem == "a")
    assert message in refused("run", option, name, "train.py")


def test_settings_that_name_the_run_folder_are_obeyed(tmp_path):
    settings = ["run_dir=elsewhere", "run_name=mine"]
    assert _where(Path("runs"), None, None, settings) == (Path("elsewhere"), "mine")
    assert _where(Path("own"), "first", None, settings) == (Path("own"), "first")
    (tmp_path / "settings.yaml").write_text('run_name: big\nrun_dir: "off"\n')
    assert _where(Path("runs"), None, tmp_path / "settings.yaml", ()) == (Path("runs"), "big")


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


def test_schedules_that_would_take_hours_are_refused(capsys, tmp_path):
    plan, long = tmp_path / "plan.json", tmp_path / "long.json"
    planned(ranks=40).write(plan)
    long.write_text(plan.read_text().replace('"microbatches": 4', '"microbatches": 90000', 1))
    code, _, err = call(capsys, *["explain", str(long)])
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

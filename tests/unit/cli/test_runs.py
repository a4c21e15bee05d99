"""``shardwright runs`` and ``shardwright show``; ``shardwright report``."""

import json
import os
import webbrowser

import pytest
from observe.plans import two_stage_plan
from observe.run_folders import run_folder
from planned import planned

from cli.calling import call
from shardwright.observe import MetricsLog, RunFolder, StepRecord
from shardwright.observe.goodput import Spent
from shardwright.observe.run_record import RunRecord
from shardwright.observe.summary import summarize


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a run, one that never did a step, one with a damaged plan, and something else."""
    monkeypatch.chdir(tmp_path)
    for age, name in enumerate(("first", "second", "third")):
        path = tmp_path / "runs" / name
        (path / "logs").mkdir(parents=True)
        os.utime(path / "logs", (age, age))
    (tmp_path / "runs" / "notes").mkdir()
    log = MetricsLog(tmp_path / "runs" / "first" / "metrics.jsonl", world_size=2)
    for step, seconds in enumerate((9.0, 1.0, 1.2, 1.1), start=1):
        log.append(
            StepRecord(
                step=step,
                seconds=seconds,
                samples=4,
                tokens=440,
                loss=5.0 - step,
                step_predicted_s=1.21,
                bubble_measured=0.3,
                bubble_predicted=0.25,
            )
        )
    log.close()
    two_stage_plan().write(tmp_path / "runs" / "first" / "plan.json")
    (tmp_path / "runs" / "third" / "plan.json").write_text("{")
    (tmp_path / "runs" / "third" / "metrics.jsonl").write_text('{"step": 1}\n')
    os.utime(tmp_path / "runs" / "first" / "logs", (0, 0))
    os.utime(tmp_path / "runs" / "third" / "logs", (2, 2))
    return tmp_path


def test_runs_are_listed_the_oldest_first(capsys, folder):
    code, out, err = call(capsys, "runs")
    assert (code, err) == (0, "")
    lines = [line.split() for line in out.splitlines()]
    assert lines[1] == ["first", "-", "4", "1.0000", "400", "tok/s", "1.10", "s", "1.21", "s", "30%", "-"]
    assert lines[2] == ["second", "-", "no", "step", "done"]
    assert lines[3][0] == "third"
    assert "is no JSON" in out.splitlines()[3]
    assert len(lines) == 4


def test_a_run_is_shown_beside_its_prediction(capsys, folder):
    code, out, err = call(capsys, "show", "runs/first")
    assert (code, err) == (0, "")
    assert "  step        1.10 s, 9% faster than predicted (1.21 s)\n" in out
    assert "  bubble      30% measured, 25% predicted\n" in out
    assert "plan: 1f1b, 3 microbatches" in out
    assert "  1f1b keeps fewer microbatches.\n" in out
    assert out.endswith("files: plan.json, metrics.jsonl, logs/\n")


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("runs/frist", "there is no run folder runs/frist. List them: shardwright runs runs"),
        ("runs/second", "no step"),
    ],
)
def test_a_folder_without_a_run(capsys, folder, path, message):
    code, out, err = call(capsys, "show", path)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("state", "step", "told"),
    [
        ("finished", 30, "finished"),
        ("failed", None, "failed"),
        ("failed", 30, "failed, saved step 30"),
        ("saved", 30, "saved step 30"),
    ],
)
def test_a_run_has_a_state(capsys, folder, state, step, told):
    run = RunFolder(folder / "runs" / "first")
    RunRecord(script="/home/me/train.py", command="shardwright run train.py").ended_as(run, state)
    if step is not None:
        (run.path / "checkpoints" / f"step-{step:08}").mkdir(parents=True)
    _, out, _ = call(capsys, "runs")
    assert any(line.startswith(f"first   {told}  ") for line in out.splitlines()), out
    _, out, _ = call(capsys, "runs", "--json")
    (row,) = (each for each in json.loads(out) if each["folder"].endswith("first"))
    assert (row["state"], row["saved_step"], row["command"]) == (state, step, "shardwright run train.py")


def test_a_run_with_a_slow_rank_and_restarts_says_so(capsys, folder):
    spent = Spent(productive_s=60, starts_s=30, lost_s=10, lost_steps=4, restarts=1)
    log = MetricsLog(folder / "runs" / "second" / "metrics.jsonl", world_size=2)
    for step in range(1, 5):
        record = StepRecord(step=step, seconds=1.0, samples=4, slow_rank=1, slow_s=0.4)
        log.append(record, spent.to_metrics())
    log.close()
    _, out, _ = call(capsys, "runs")
    lines = out.splitlines()
    assert lines[0].split()[-2:] == ["productive", "slow"]
    assert lines[2].split()[-4:] == ["60%", "rank", "1:", "40%"]
    _, out, _ = call(capsys, "show", "runs/second")
    assert "  time        productive 60% of 1m40s: starts 30.0 s, lost 10.0 s (4 steps, 1 restart)\n" in out
    assert "  waited for  rank 1: 40% of the time of the last steps\n" in out
    _, out, _ = call(capsys, "runs", "--json")
    (second,) = (run for run in json.loads(out) if run["folder"].endswith("second"))
    assert second["spent"]["restarts"] == 1
    assert second["spent"]["productive_share"] == 0.6
    assert second["slow_rank"] == "rank 1: 40%"


def test_of_a_long_run_the_ends_alone_are_read(tmp_path):
    """The middle may be anything: nobody looks there."""
    path = tmp_path / "runs" / "long" / "metrics.jsonl"
    path.parent.mkdir(parents=True)
    log = MetricsLog(path, world_size=1)
    for step in range(1, 8001):
        log.append(
            StepRecord(step=step, seconds=3.0 if step < 4000 else 1.0, samples=8, loss=9.0 - step / 1000)
        )
    log.close()
    middle = path.stat().st_size // 3
    with path.open("r+b") as file:
        file.seek(middle)
        file.write(b"x" * 1000)
    summary = summarize(tmp_path / "runs" / "long")
    assert (summary.steps, summary.step_s, summary.throughput) == (8000, 1.0, 8.0)
    assert (summary.first_loss, summary.final_loss) == (8.999, 1.0)
    assert summary.left_out == ""


@pytest.fixture
def run(tmp_path):
    return run_folder(tmp_path / "runs" / "first", planned())


def test_a_run_gets_its_report(capsys, run):
    pytest.importorskip("plotly")
    code, out, err = call(capsys, "report", run)
    assert (code, out, err) == (0, f"{run / 'report.html'}\n", "")
    assert "<h1>first</h1>" in (run / "report.html").read_text()
    assert "report.html" in call(capsys, "show", run)[1]


def test_a_plan_gets_one_beside_it(capsys, run, tmp_path, monkeypatch):
    pytest.importorskip("plotly")
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: bool(opened.append(url)))
    code, out, err = call(capsys, "report", run / "plan.json", "--open")
    assert (code, out) == (0, f"{run / 'plan.html'}\n")
    assert opened == [(run / "plan.html").as_uri()]
    assert "no browser could be opened" in err
    call(capsys, "report", run / "plan.json", "-o", tmp_path / "other.html")
    assert (tmp_path / "other.html").exists()


def test_without_plotly_it_says_how_to_get_it(capsys, run, monkeypatch):
    from shardwright.observe.report import page

    page.packed_library.cache_clear()
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    code, out, err = call(capsys, "report", run)
    assert (code, out) == (2, "")
    assert "Run: pip install 'shardwright[report]'" in err
    assert not (run / "report.html").exists()

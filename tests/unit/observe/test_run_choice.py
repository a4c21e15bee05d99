"""Which folder the same command gets when it comes again: that of a run that was stopped, or a new one."""

import subprocess
import sys
from pathlib import Path

import pytest

from observe.run_folders import HOLDS
from shardwright.errors import UsageError
from shardwright.observe.metrics import MetricsLog, StepRecord, read_steps
from shardwright.observe.run_record import (
    Again,
    BegunRun,
    RunRecord,
    RunState,
    begin_run,
    command_of_script,
    go_on,
    read_record,
)


def command(*arguments: str, script: str = "/home/me/train.py", **settings: int) -> RunRecord:
    return RunRecord(
        script=script, arguments=arguments, settings=settings, command="shardwright run train.py"
    )


def begin(
    base: Path, what: RunRecord | None = None, *, name: str | None = None, again: Again = "auto"
) -> BegunRun:
    what = what or command()
    return begin_run(base, what, name=name, part=None, again=again, resume_by="shardwright run --resume")


def end(run: BegunRun, state: RunState, *, saved: int | None = None, folder: Path | None = None) -> BegunRun:
    if saved is not None:
        root = folder or run.folder.path / "checkpoints"
        (root / f"step-{saved:08}").mkdir(parents=True)
    run.record.ended_as(run.folder, state)
    return run


@pytest.mark.parametrize("state", ["running", "saved", "stopped", "failed"])
def test_a_run_that_did_not_finish_goes_on(tmp_path: Path, state: RunState) -> None:
    first = end(begin(tmp_path), state, saved=30)
    assert first.folder.path.name == "train"
    again = begin(tmp_path)
    assert again.folder == first.folder
    assert again.told == (f"{first.folder} goes on from step 30",)
    assert go_on(again.folder, again.record).endswith("checkpoints; go on: shardwright run train.py")


def test_a_finished_run_is_left_alone_and_named(tmp_path: Path) -> None:
    first = end(begin(tmp_path), "finished", saved=200)
    second = begin(tmp_path)
    assert second.folder.path.name == "train-2"
    assert second.saved is None
    (remark,) = second.told
    assert remark == (
        f"note: {first.folder} has saved step 200 and finished. To continue it: shardwright run --resume"
    )
    found = read_record(first.folder)
    assert found is not None
    assert found.did_finish


def test_a_script_without_checkpoints_gets_a_new_folder_each_time_and_no_remark(tmp_path: Path) -> None:
    names = [end(begin(tmp_path), state).folder.path.name for state in ("finished", "failed", "stopped")]
    assert names == ["train", "train-2", "train-3"]
    assert begin(tmp_path).told == ()


def test_other_arguments_are_another_run_which_is_told_how_to_continue_the_first(tmp_path: Path) -> None:
    first = end(begin(tmp_path, command("--lr", "1")), "saved", saved=30)
    for other in (command("--lr", "2"), command("--lr", "1", microbatches=4)):
        again = begin(tmp_path, other)
        assert again.folder != first.folder
        assert again.told == (
            f"note: {first.folder} has saved step 30 and did not finish, with other arguments or settings. "
            "To continue it: shardwright run --resume",
        )
    assert begin(tmp_path, command(script="/home/me/other.py")).told == ()


def test_a_run_that_was_moved_with_its_script_goes_on(tmp_path: Path) -> None:
    """A project in another folder, or mounted elsewhere, began at step 0 again."""
    there, here = tmp_path / "there", tmp_path / "here"
    first = end(begin(there / "runs", command(script=str(there / "train.py"))), "stopped", saved=30)
    there.rename(here)
    for _ in range(2):
        again = begin(here / "runs", command(script=str(here / "train.py")))
        assert again.folder.path == here / "runs" / first.folder.path.name
        assert again.told == (f"{again.folder} goes on from step 30",)
        end(again, "stopped")
    other = begin(here / "runs", command(script=str(here / "old" / "train.py")))
    assert other.folder.path.name == "train-2"
    assert other.told == ()


def test_resume_and_fresh_overrule(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no run of train.py in .* has a checkpoint to resume from"):
        begin(tmp_path, again="resume")
    first = end(begin(tmp_path, command("--steps", "9")), "finished", saved=9)
    longer = command("--steps", "20")
    assert end(begin(tmp_path, longer, again="resume"), "saved", saved=12).folder == first.folder
    assert begin(tmp_path, longer, again="fresh").folder.path.name == "train-2"


def test_a_name_continues_whatever_has_it_and_is_not_taken_by_others(tmp_path: Path) -> None:
    first = end(begin(tmp_path, name="big"), "saved", saved=30)
    assert begin(tmp_path).folder.path.name == "train"
    again = begin(tmp_path, name="big")
    assert again.folder == first.folder
    assert again.saved is not None


def test_a_run_that_goes_on_is_not_disturbed(tmp_path: Path) -> None:
    first = end(begin(tmp_path), "running", saved=30)
    holds = [sys.executable, "-c", HOLDS, str(first.folder.path)]
    with subprocess.Popen(holds, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "holds\n"
        beside = begin(tmp_path)
        assert (beside.folder.path.name, beside.told) == ("train-2", ())
        with pytest.raises(UsageError, match="goes on in another process"):
            begin(tmp_path, again="resume")
        other.kill()


def test_a_prompt_and_a_notebook_have_folders_named_after_the_time(tmp_path: Path) -> None:
    for script in (str(tmp_path), "/site-packages/ipykernel_launcher.py"):
        assert begin(tmp_path / "runs", command(script=script)).folder.path.name.startswith("20")


def test_a_script_under_another_launcher_has_its_own_command() -> None:
    alone = command_of_script(["train.py", "--lr", "a b"], settings={}, world_size=1)
    assert alone.arguments == ("--lr", "a b")
    assert alone.command.endswith("'a b'")
    assert command_of_script(["train.py"], settings={}, world_size=2).command == "the same command"


def record(step: int, loss: float) -> StepRecord:
    return StepRecord(step=step, seconds=1.0, samples=4, loss=loss)


def test_metrics_of_two_runs_do_not_mix(tmp_path: Path) -> None:
    """A name given twice to a script without checkpoints wrote two runs into one file."""
    path = tmp_path / "metrics.jsonl"
    for run in range(3):
        log = MetricsLog(path, world_size=1)
        log.append(record(1, float(run)))
        log.append(record(2, float(run)))
        log.close()
    assert [step["train/loss"] for step in read_steps(path)] == [2.0, 2.0]
    assert [step["train/loss"] for step in read_steps(tmp_path / "metrics-1.jsonl")] == [0.0, 0.0]
    assert log.kept == tmp_path / "metrics-2.jsonl"

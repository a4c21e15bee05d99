"""Mistakes with checkpoints: each is told on all ranks, with what to do."""

from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointed import Dropped, training
from sharded import QUIET, optimizer_of
from stacks import train as squares

import shardwright.torch as sw
from choices import some_combinations
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.testing import RanksFailedError, run_ranks

PIPELINE = {"pipeline_parallel_degree": 2, "microbatches": 2}


def prepared(**settings: Any) -> Any:
    """A run of two stages that has not made a step; (sw, model)."""
    sw.init({**QUIET, **PIPELINE, **settings})
    return sw, sw.DistributedModel(Dropped().double())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blocks": 3}, r"only in the checkpoint: net\.blocks\.3\.down\.bias"),
        ({"optimizer": "one group"}, "2 parameter groups, and here it has 1.*take the weights alone"),
        ({"state": {}}, r"has the states \['data', 'scheduler'\], and this run has \[\]"),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, dict) else "",
)
def test_a_checkpoint_of_another_run(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    run_ranks(training, 1, {}, tmp_path, until=3)

    def resume() -> None:
        sw.init({**QUIET, **PIPELINE})
        model = sw.DistributedModel(Dropped(change.get("blocks", 4)).double())
        inner = torch.optim.AdamW(model.parameters())
        updates = sw.DistributedOptimizer(inner if "optimizer" in change else optimizer_of("AdamW", model))
        scheduler = torch.optim.lr_scheduler.OneCycleLR(updates, max_lr=0.1, total_steps=50)
        loader = sw.data_loader(torch.utils.data.TensorDataset(torch.zeros(40)), 8, seed=3)
        sw.Checkpoints(tmp_path, state=change.get("state", {"scheduler": scheduler, "data": loader})).resume()

    with pytest.raises(RanksFailedError, match=message):
        run_ranks(resume, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "run_dir is off, so there is no run folder"),
        ({"folder": "/proc/nowhere"}, "cannot be a folder of checkpoints"),
        ({"folder": "x", "every": 0}, "every is 0, and must be a whole number from 1"),
        ({"folder": "x", "keep": True}, "keep is True"),
        ({"folder": "x", "state": {"a/b": torch.nn.Linear(1, 1)}}, "state has the name 'a/b'"),
        ({"folder": "x", "state": {"a": 1}}, r"is a int, which has no state_dict\(\)"),
        ({"folder": "x", "state": {"a": torch.optim.SGD([torch.zeros(1)])}}, "Wrap it in sw.Distributed"),
        ({"folder": "x", "on_failed_save": "ignore"}, "on_failed_save is 'ignore'"),
    ],
)
def test_options(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    def run() -> None:
        import os

        os.chdir(tmp_path)
        sw, _ = prepared()
        sw.Checkpoints(**options)

    with pytest.raises(RanksFailedError, match=message):
        run_ranks(run, 2)


@pytest.mark.parametrize(("method", "step"), some_combinations(["save", "step_done"], ["3", 3.0, True, -1]))
def test_steps_that_are_no_numbers_of_steps(method: str, step: Any, tmp_path: Path) -> None:
    def run() -> None:
        sw, _ = prepared()
        getattr(sw.Checkpoints(tmp_path, every=2), method)(step)

    with pytest.raises(RanksFailedError, match="must be how many steps were done"):
        run_ranks(run, 2)


def test_a_loop_that_counts_from_0(tmp_path: Path) -> None:
    """It saved one step too few, so that a resumed run repeated a step."""

    def run() -> None:
        sw.init(QUIET)
        model = sw.DistributedModel(torch.nn.Linear(4, 1))
        checkpoints = sw.Checkpoints(tmp_path)
        train = sw.step(squares)
        checkpoints.step_done(0)
        train(model, torch.ones(4, 4))
        checkpoints.step_done(0)

    with pytest.raises(RanksFailedError, match=r"write checkpoints\.step_done\(step \+ 1\)"):
        run_ranks(run, 1)


def test_another_kind_of_optimizer(tmp_path: Path) -> None:
    """It resumed with AdamW's betas in the groups of SGD, and without its momentum."""

    def run(kind: str) -> None:
        sw.init(QUIET)
        model = sw.DistributedModel(torch.nn.Linear(4, 1))
        make = {"AdamW": torch.optim.AdamW, "SGD": torch.optim.SGD}[kind]
        sw.DistributedOptimizer(make(model.parameters(), lr=0.1))
        checkpoints = sw.Checkpoints(tmp_path)
        checkpoints.resume()
        checkpoints.save(1)
        checkpoints.close()

    run_ranks(run, 1, "AdamW")
    with pytest.raises(RanksFailedError, match=r"with amsgrad, betas, .* and this one \(SGD\) has dampening"):
        run_ranks(run, 1, "SGD")


@pytest.mark.parametrize(
    ("chosen", "message"),
    [("checkpoints/step-00000003", "is one checkpoint. Give the folder"), (".", "is the folder of a run")],
)
def test_a_folder_beside_the_one_that_is_meant(chosen: str, message: str, tmp_path: Path) -> None:
    """Bug: the run began anew there, and its lock made the checkpoint one that has a foreign file."""
    run_ranks(training, 1, {}, tmp_path / "checkpoints", until=3)

    def run() -> None:
        sw, _ = prepared()
        sw.Checkpoints(tmp_path / chosen)

    with pytest.raises(RanksFailedError, match=message):
        run_ranks(run, 2)
    CheckpointFolder(tmp_path / "checkpoints").open().check()


def test_before_a_model_is_wrapped(tmp_path: Path) -> None:
    def run() -> None:
        sw.init(QUIET)
        sw.Checkpoints(tmp_path)

    with pytest.raises(RanksFailedError, match=r"Call sw\.DistributedModel\(model\) before sw\.Checkpoints"):
        run_ranks(run, 1)


def test_a_save_on_some_ranks_names_the_others(tmp_path: Path) -> None:
    def run() -> None:
        sw, _ = prepared()
        checkpoints = sw.Checkpoints(tmp_path)
        if sw.rank() == 0:
            checkpoints.save(1)

    with pytest.raises(RanksFailedError, match=r"checkpoints\.save\(\)") as failed:
        run_ranks(run, 2, timeout_s=60)
    assert "rank 1" in str(failed.value)


def test_a_rank_without_memory_tells_the_others(tmp_path: Path) -> None:
    """They waited for what it had to say of its part, for as long as it lived."""

    def run() -> str:
        from shardwright.checkpoint.folder import CheckpointFolder

        def no_memory(*args: Any, **kwargs: Any) -> None:
            raise MemoryError("none left")

        sw, model = prepared()
        training_step(sw, model)
        checkpoints = sw.Checkpoints(tmp_path)
        checkpoints.save(1, asynchronous=False)
        if sw.rank() == 0:
            CheckpointFolder.commits = no_memory  # type: ignore[method-assign]
        try:
            checkpoints.resume()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    first, second = run_ranks(run, 2, timeout_s=30)
    assert first == "MemoryError: none left"
    assert second == "ShardwrightError: rank 0 has failed: MemoryError: none left"


def training_step(sw: Any, model: Any) -> None:
    sw.step(lambda model, x: model.backward(model(x).sum()))(model, torch.zeros(2, 4, dtype=torch.int64))


@pytest.mark.thorough
def test_two_runs_do_not_save_in_one_folder(tmp_path: Path) -> None:
    """The first holds the folder until its process ends."""

    def run() -> None:
        import os
        import subprocess
        import sys

        sw, _ = prepared(timeout_s=3000)
        sw.Checkpoints(tmp_path)
        if sw.rank() == 0:
            other = (
                "import torch, shardwright.torch as sw; sw.init({'run_dir': 'off'});"
                "sw.DistributedModel(torch.nn.Linear(1, 1)); sw.Checkpoints(sys.argv[1])"
            )
            environ = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "PYTHONPATH")}
            ended = subprocess.run(
                [sys.executable, "-c", f"import sys; {other}", str(tmp_path)],
                capture_output=True,
                text=True,
                env=environ,
                check=False,
            )
            assert "another run saves its checkpoints" in ended.stderr, ended.stderr
        sw.barrier()

    run_ranks(run, 2)

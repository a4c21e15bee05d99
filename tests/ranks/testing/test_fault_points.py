"""Faults on purpose come at each phase of a run, and a disk that was full has room for the next save."""

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import QUIET

from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.testing.fault_points import happened

LAYOUTS = {"stages": {"pipeline_parallel_degree": 2}, "replicas": {"pipeline_parallel_degree": 1}}
PHASES = ("init", "start", "forward", "backward", "update", "save", "end")


def train(folder: Path, settings: dict[str, Any], faults: list[dict[str, Any]]) -> None:
    """Four steps, each with a checkpoint."""
    import shardwright.torch as sw

    path = folder / "chaos.json"
    if os.environ["RANK"] == "0":
        path.with_suffix(".tmp").write_text(json.dumps({"faults": faults}))
        path.with_suffix(".tmp").rename(path)
    while not path.exists():
        pass
    os.environ["SHARDWRIGHT_CHAOS"] = str(path)
    sw.init({**QUIET, "microbatches": 2, **settings})
    model = sw.DistributedModel(torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4))))
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoints = sw.Checkpoints(folder / "saved", every=1, keep=None, on_failed_save="warn")

    @sw.step
    def step(model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(4):
            step(model, torch.ones(4, 4))
            optimizer.step()
            checkpoints.step_done(number + 1)
            checkpoints.wait()
        sw.shutdown()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_fault_comes_at_each_phase(tmp_path: Path, layout: str) -> None:
    faults: list[dict[str, Any]] = [
        {"kind": "pause", "seconds": 0.01, "rank": 1, "phase": phase}
        | ({"step": 2} if phase in PHASES[2:6] else {})
        for phase in PHASES
    ]
    run_ranks(train, 2, tmp_path, LAYOUTS[layout], faults)
    notes = happened(tmp_path / "faults.jsonl")
    steps = [None, None, 2, 2, 2, 2, None]
    assert [(note["phase"], note["step"], note["rank"]) for note in notes] == [
        (phase, step, 1) for phase, step in zip(PHASES, steps, strict=True)
    ]


def test_a_full_disk_fails_one_save(tmp_path: Path) -> None:
    faults = [{"kind": "full_disk", "rank": 1, "phase": "save", "step": 2}]
    run_ranks(train, 2, tmp_path, LAYOUTS["stages"], faults)
    assert [commit.step for commit in CheckpointFolder(tmp_path / "saved").commits()] == [1, 3, 4]


def test_an_error_is_that_of_its_rank(tmp_path: Path) -> None:
    faults = [{"kind": "raise", "rank": 1, "step": 2, "phase": "backward"}]
    with pytest.raises(RanksFailedError, match="a fault on purpose"):
        run_ranks(train, 2, tmp_path, LAYOUTS["stages"], faults)


def test_a_file_for_other_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RanksFailedError, match="rank 2, but the ranks are 0 to 1"):
        run_ranks(train, 2, tmp_path, LAYOUTS["stages"], [{"kind": "kill", "rank": 2}])

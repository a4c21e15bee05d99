"""Runs that go on from folders of `torch.distributed.checkpoint`, or are exported as such, in one process."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cli.calling import call
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import shardwright.torch as sw
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.torch.checkpoints.dcp_export import export_dcp


class Tied(nn.Module):
    """One weight with two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(7, 4)
        self.middle = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.middle(self.embedding(x)))


def save(state: dict[str, Any], folder: Path) -> Path:
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


def run(folder: Path, *, steps: int, **settings: Any) -> None:
    """Trains a tied model, and saves it."""
    sw.init({"run_dir": "off", "profile": "estimated", **settings})
    try:
        model = sw.DistributedModel(Tied())
        optimizer = sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
        train = sw.step(lambda model, x: model.backward(model(x).float().square().sum()))
        checkpoints = sw.Checkpoints(folder)
        for _ in range(steps):
            train(model, torch.arange(7))
            optimizer.step()
            optimizer.zero_grad()
        checkpoints.save(steps)
        checkpoints.close()
    finally:
        sw.shutdown()


class Counter:
    """Something with a state."""

    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def trained() -> dict[str, Any]:
    """The state after an update of PyTorch alone."""
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.arange(7)).square().sum().backward()
    optimizer.step()
    weights, moments = get_state_dict(model, optimizer)
    return {"model": dict(weights), "optimizer": dict(moments)}


def test_states_that_begin_anew_are_named(tmp_path: Path, capsys: Any) -> None:
    """``state={"scheduler": ...}`` of a folder that has ``sched`` began anew without a word."""
    source = save({**trained(), "sched": {"count": 7}}, tmp_path / "there")
    assert call(capsys, "ckpt", "import", source, "-o", tmp_path / "run")[0] == 0
    sw.init({"run_dir": "off", "profile": "estimated"})
    try:
        model = sw.DistributedModel(Tied())
        sw.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.1))
        states = {"sched": Counter(), "scheduler": Counter(), "data": Counter()}
        sw.Checkpoints(tmp_path / "run", state=states).resume()
    finally:
        sw.shutdown()
    assert [each.count for each in states.values()] == [7, 0, 0]
    said = capsys.readouterr().err
    assert "step-00000001; what was imported has no scheduler, data: begun anew" in said


@pytest.mark.parametrize("flat", [False, True])
def test_a_tied_weight_has_its_master_copy_under_both_names(flat: bool, tmp_path: Path) -> None:
    """Under ``bf16``, an export gave the second name the rounded weight, which FSDP2 loads last."""
    run(tmp_path / "run", steps=2, bf16=True)
    export_dcp(CheckpointFolder(tmp_path / "run").open(), tmp_path / "out", flat=flat)
    prefix = "" if flat else "model."
    names = [f"{prefix}{name}.weight" for name in ("embedding", "head", "middle")]
    found = {name: torch.zeros(4 if "middle" in name else 7, 4) for name in names}
    with warnings.catch_warnings(action="ignore"):
        dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    first, second, other = found.values()
    assert torch.equal(first, second)
    for weight in (first, other):
        assert not torch.equal(weight.bfloat16().float(), weight)

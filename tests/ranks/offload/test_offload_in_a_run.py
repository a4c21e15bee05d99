"""Offload as a script sees it: its timeline, its folder, its errors; compiled models; plans from a file."""

import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from mounts import SmallDisk, in_own_mounts
from shardwright.errors import UsageError
from shardwright.testing import run_ranks
from shardwright.torch.offload.disk import DiskTier

WIDTH = 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x.sin())


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(6)))


def train_some(settings: dict[str, Any], *, steps: int = 3, compiled: bool = False) -> list[float]:
    """Losses of some steps, each with an update."""
    # Of the compiler itself, where an input is no leaf.
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")
    quiet = {
        "run_dir": "off",
        "profile": "estimated",
        "microbatches": 2,
        "pipeline": "1f1b",  # others round otherwise
        "activation_loading_horizon": 1,
    }
    sw.init({**quiet, **settings})
    try:
        module = stack()
        model = sw.DistributedModel(torch.compile(module, backend="eager") if compiled else module)
        optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))

        @sw.step
        def train(model: Any, x: Tensor) -> Tensor:
            loss: Tensor = model(x).square().mean()
            model.backward(loss)
            return loss

        losses = []
        for step in range(steps):
            torch.manual_seed(step)
            optimizer.zero_grad()
            losses.append(float(train(model, torch.randn(2 * 256, WIDTH)).reduce_mean()))
            optimizer.step()
        return losses
    finally:
        sw.shutdown()


OFFLOADS = {"offload_activations": True}


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_timeline_has_the_copies(ranks: int, tmp_path: Path) -> None:
    shown = {"run_dir": str(tmp_path), "run_name": "shown", "trace": True, **OFFLOADS}
    plain = run_ranks(train_some, ranks, {})
    assert run_ranks(train_some, ranks, shown) == plain
    events = json.loads((tmp_path / "shown" / "trace.json").read_text())["traceEvents"]
    copies = [e for e in events if e["ph"] == "X" and e["cat"] in ("offload", "load")]
    assert {e["pid"] for e in copies} == set(range(ranks))
    assert {e["args"]["microbatch"] for e in copies} == {0, 1}
    assert {e["cat"] for e in copies} == {"offload", "load"}
    assert "copy to the host" in (tmp_path / "shown" / "report.html").read_text()
    plan = tmp_path / "shown" / "plan.json"
    if ranks > 1:
        stages = json.loads(plan.read_text())["stages"]
        assert all(stage["offload"] == stage["units"] for stage in stages)


def follow_a_plan(plan: str) -> list[float]:
    return train_some({"plan": plan})


def test_a_plan_says_which_units_offload(tmp_path: Path) -> None:
    """Without the setting; and a plan of an earlier version, which has no such field, still runs."""
    shown = {"run_dir": str(tmp_path), "run_name": "shown", **OFFLOADS}
    plain = run_ranks(train_some, 2, shown)
    file = tmp_path / "shown" / "plan.json"
    assert run_ranks(follow_a_plan, 2, str(file)) == plain
    document = json.loads(file.read_text())
    for stage in document["stages"]:
        del stage["offload"]
    file.write_text(json.dumps(document))
    assert run_ranks(follow_a_plan, 2, str(file)) == plain


@pytest.mark.thorough
def test_compiled_models() -> None:
    plain = run_ranks(train_some, 2, {}, compiled=True, timeout_s=120)
    assert run_ranks(train_some, 2, OFFLOADS, compiled=True, timeout_s=120) == plain


def train_on_a_small_disk(folder: Path) -> None:
    SmallDisk(folder, 64 * 4096)
    tempfile.tempdir = str(folder)
    with pytest.raises(UsageError, match=r"offloaded to .* which has no room for .* Set TMPDIR"):
        train_some(OFFLOADS)
    assert [name for name in os.listdir(folder) if not name.startswith("torchinductor")] == []


def test_a_disk_without_room_ends_the_step(tmp_path: Path, capabilities: dict[str, bool]) -> None:
    if not capabilities["mounts"]:
        pytest.skip("this process cannot mount file systems")
    in_own_mounts(lambda: train_on_a_small_disk(tmp_path))


def train_without_room_on_the_second_rank() -> str:
    def reserve(tier: DiskTier, num_bytes: int) -> None:
        # Six layers, of which each keeps its input and the sine of it, of 256 rows of 64 numbers.
        assert num_bytes > 256 * 64 * 4
        if os.environ["RANK"] == "1":
            raise UsageError("the disk is full")

    with patch.object(DiskTier, "reserve", reserve), pytest.raises(UsageError) as caught:
        train_some(OFFLOADS)
    return str(caught.value)


def test_a_rank_without_room_is_told_to_all() -> None:
    assert run_ranks(train_without_room_on_the_second_rank, 2) == ["rank 1: the disk is full"] * 2

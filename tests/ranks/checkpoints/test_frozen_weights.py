"""Weights that are not trained lie on the disk once, as long as nobody changes them."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import QUIET
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.checkpoint.folder import CheckpointFolder
from shardwright.testing import run_ranks

STAGES = {"pipeline_parallel_degree": 2, "microbatches": 2}
SHARDS = {"sharded_data_parallel_degree": 2, "sdp_param_persistence_threshold": 1}


def adapted() -> nn.Module:
    """Large frozen layers, each with a small trained one beside it, and a buffer that changes."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 64), nn.Linear(64, 1), nn.Linear(1, 64), nn.BatchNorm1d(64)]
    for layer in layers[:1]:
        layer.requires_grad_(False)
    return nn.Sequential(*layers, nn.Linear(64, 64).requires_grad_(False))


def training(
    settings: dict[str, Any], folder: Path, first: int, until: int, change: int = 0, keep: int | None = None
) -> tuple[list[float], dict[str, Tensor]]:
    sw.init({**QUIET, **settings})
    model = sw.DistributedModel(adapted().double())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = sw.DistributedOptimizer(torch.optim.AdamW(trained, lr=0.01))
    checkpoints = sw.Checkpoints(folder, every=1, keep=keep)
    assert checkpoints.resume() == first

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        return loss

    losses = []
    for step in range(first, until):
        x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        optimizer.zero_grad()
        losses.append(train(model, x).reduce_mean().item())
        optimizer.step()
        if change == step + 1:
            for parameter in model.local_parameters():
                if not parameter.requires_grad:
                    parameter.data.mul_(0.5)  # no version counts it
        checkpoints.step_done(step + 1)
        checkpoints.wait()
    state = {name: t for name, t in model.state_dict().items() if isinstance(t, Tensor)}
    return losses, state


def frozen_files(folder: Path) -> list[list[Path]]:
    """Those of each checkpoint, the oldest first."""
    return [sorted(path.glob("*.frozen.safetensors")) for path in sorted(folder.glob("step-*"))]


def is_same(files: list[Path], others: list[Path]) -> bool:
    (found,) = {one.samefile(other) for one, other in zip(files, others, strict=True)}
    return found


@pytest.mark.parametrize("settings", [STAGES, SHARDS])
def test_frozen_weights_are_written_once_and_each_checkpoint_is_whole(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    ranks = run_ranks(training, 2, settings, tmp_path / "whole", 0, 4)
    first, second, *_ = frozen_files(tmp_path / "whole")
    assert is_same(first, second)
    newest = tmp_path / "whole" / "step-00000002"
    alone = sum(path.stat().st_size for path in newest.iterdir() if path.stat().st_nlink == 1)
    assert alone < sum(path.stat().st_size for path in second)
    shutil.rmtree(tmp_path / "whole" / "step-00000001")
    for later in ("step-00000003", "step-00000004"):
        shutil.rmtree(tmp_path / "whole" / later)
    for (losses, state), (rest, final) in zip(
        ranks, run_ranks(training, 2, settings, tmp_path / "whole", 2, 4), strict=True
    ):
        assert rest == losses[2:]
        assert all(torch.equal(final[name], value) for name, value in state.items())


def test_changed_weights_are_written_again_and_old_checkpoints_go(tmp_path: Path) -> None:
    """Also where another number of ranks goes on, which writes files of its own."""
    ranks = run_ranks(training, 1, {}, tmp_path / "plain", 0, 5, change=3)
    run_ranks(training, 1, {}, tmp_path / "cut", 0, 4, change=3)
    first, second, third, fourth = frozen_files(tmp_path / "cut")
    assert is_same(first, second)
    assert not is_same(second, third)
    assert is_same(third, fourth)
    for losses, state in run_ranks(
        training, 2, {**STAGES, "microbatches": 1}, tmp_path / "cut", 4, 5, keep=2
    ):
        assert losses == pytest.approx(ranks[0][0][4:], rel=1e-9)
        torch.testing.assert_close(state, ranks[0][1], rtol=1e-8, atol=1e-10)
    folder = CheckpointFolder(tmp_path / "cut")
    assert [commit.step for commit in folder.commits()] == [4, 5]
    for commit in folder.commits():
        folder.open(commit.name).check()


def test_damage_to_one_file_leaves_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(training, 1, {}, tmp_path, 0, 5)
    *shared, fresh = frozen_files(tmp_path)
    assert all(is_same(shared[0], other) for other in shared)
    assert not is_same(shared[0], fresh)


def test_where_there_are_no_links_files_are_written(tmp_path: Path) -> None:
    run_ranks(without_links, 1, tmp_path)
    first, second = frozen_files(tmp_path)
    assert not is_same(first, second)
    assert first[0].read_bytes() == second[0].read_bytes()


def without_links(folder: Path) -> None:
    import os

    def refused(*_: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    os.link = refused
    training({}, folder, 0, 2)

"""`nn.SyncBatchNorm` over replicas, each of any pipeline: the statistics of all their samples."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright.torch as sw
from choices import in_sweep
from shardwright.errors import UsageError
from shardwright.testing import run_ranks

SAMPLES = 4


def pictures(*, affine: bool = True) -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.BatchNorm1d(8, affine=affine),
        nn.Linear(8, 3),
    )
    return model.double()


def differences(pipeline: int, microbatches: int, group: str) -> list[float]:
    """Of gradients and the state after two steps, to a plain loop over the microbatches of all replicas."""
    torch.manual_seed(0)
    plain = pictures()
    settings = {"pipeline_parallel_degree": pipeline, "microbatches": microbatches}
    sw.init({"profile": "estimated", "run_dir": "off", **settings})
    own_group = sw.get_dp_process_group() if group == "replicas" else None
    own_group = dist.group.WORLD if group == "world" else own_group
    model = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain), own_group)
    wrapped = sw.DistributedModel(model)
    mine = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(plain.parameters(), 0.1)

    @sw.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    found = [0.0]
    for _ in range(2):
        replicas = sw.dp_size()
        x = torch.randn(replicas, SAMPLES, 1, 7, 7, dtype=torch.float64)
        y = torch.randint(0, 3, (replicas, SAMPLES))
        mine.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        train_step(wrapped, x[sw.dp_rank()], y[sw.dp_rank()])
        for part, target in zip(x.chunk(microbatches, 1), y.chunk(microbatches, 1), strict=True):
            loss = F.cross_entropy(plain(part.flatten(0, 1)), target.flatten())
            (loss / microbatches).backward()
        own = dict(plain.named_parameters())
        found += [
            float((p.grad - own[name].grad).abs().max()) for name, p in wrapped.local_named_parameters()
        ]
        mine.step()
        theirs.step()
    state = wrapped.state_dict()
    apart = [float((state[name] - value).abs().max()) for name, value in plain.state_dict().items()]
    return [max(found), max(apart)]


@pytest.mark.parametrize(
    ("ranks", "pipeline", "microbatches", "group"),
    [(4, 2, 2, ""), (4, 2, 1, "replicas"), (2, 1, 2, "world"), in_sweep(2, 2, 2, "")],
)
def test_statistics_of_all_replicas(ranks: int, pipeline: int, microbatches: int, group: str):
    """With a pipeline, the layer waited for the other stages as for replicas; on CPUs it was refused."""
    for found in run_ranks(differences, ranks, pipeline, microbatches, group):
        assert max(found) < 1e-12


def refusals() -> list[str]:
    found = []
    for name in ("between units", "group of stages"):
        sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 2, "pipeline_parallel_degree": 2})
        group = dist.new_group([0, 1, 2, 3]) if name == "group of stages" else None
        plain = pictures(affine=name == "group of stages")
        model = sw.DistributedModel(nn.SyncBatchNorm.convert_sync_batchnorm(plain, group))

        @sw.step
        def train_step(model: Any, x: Tensor) -> Tensor:
            loss = model(x).mean()
            model.backward(loss)
            return loss

        with pytest.raises(UsageError) as caught:
            train_step(model, torch.randn(4, 1, 7, 7, dtype=torch.float64))
        found.append(str(caught.value))
        if name == "between units":
            sw.shutdown()
    return found


def test_norms_that_cannot_be_synchronised():
    for between, stages in run_ranks(refusals, 4):
        assert "affine=False" in between
        assert "ranks [0, 1, 2, 3], but of these only" in stages

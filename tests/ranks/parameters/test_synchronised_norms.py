"""`nn.SyncBatchNorm` over replicas, each of any pipeline: the statistics of all their samples.

Models built without memory train as models built in the ordinary way.
"""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded import QUIET
from stacks import train as squares
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright.torch as sw
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
    [(4, 2, 2, ""), (4, 2, 1, "replicas"), (2, 1, 2, "world")],
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


WIDTH = 80


def build() -> nn.Module:
    torch.manual_seed(3)
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)]
    return nn.Sequential(*blocks, nn.Linear(WIDTH, WIDTH))


def losses(settings, *, delayed, initialize=None):
    sw.init({**QUIET, **settings})
    with sw.delay_param_initialization(enabled=delayed):
        model = build()
    assert all(layer.is_meta is delayed for layer in model.parameters() if layer.dim() == 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model = sw.DistributedModel(model)
    optimizer = sw.DistributedOptimizer(optimizer)

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss = (model(x) - x).square().mean()
        model.backward(loss)
        return loss

    found = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        x = torch.randn(8, WIDTH, generator=generator)
        optimizer.zero_grad()
        found.append(train(model, x).reduce_mean().item())
        optimizer.step()
    return found, model.state_dict()


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [(1, {}), (2, {"microbatches": 2}), (2, {"sharded_data_parallel_degree": 2})],
)
def test_it_trains_as_otherwise(ranks, settings):
    expected = run_ranks(losses, ranks, settings, delayed=False)
    found = run_ranks(losses, ranks, settings, delayed=True)
    for (own, state), (own_expected, expected_state) in zip(found, expected, strict=True):
        assert own == own_expected
        assert all(torch.equal(state[name], value) for name, value in expected_state.items())


def memory_of_a_rank(settings):
    """The most elements of parameters that had memory at once, beside what they all are."""
    import shardwright.torch.sharding.sharding as sharding

    sw.init({**QUIET, **settings})
    with sw.delay_param_initialization():
        model = build()
    made = []
    original = sharding.recorded_values
    sharding.recorded_values = lambda parameter: made.append(parameter.numel()) or original(parameter)
    wrapped = sw.DistributedModel(model)
    waiting = sum(p.numel() for p in model.parameters() if p.is_meta)
    train = sw.step(squares)
    train(wrapped, torch.ones(4, WIDTH))
    return waiting, made


def test_shared_parameters_are_made_one_by_one_and_cut():
    for waiting, made in run_ranks(memory_of_a_rank, 2, {"sharded_data_parallel_degree": 2}):
        assert waiting == 5 * WIDTH**2
        assert made == [WIDTH**2] * 5


def test_in_bfloat16():
    settings = {"sharded_data_parallel_degree": 2, "bf16": True}
    expected = run_ranks(losses, 2, settings, delayed=False)
    found = run_ranks(losses, 2, settings, delayed=True)
    assert [own for own, _ in found] == [own for own, _ in expected]

"""Statistics over the samples of a microbatch: found, said, and over the whole batch on demand."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright.torch as sw
from shardwright.cluster import Cluster, Device, Link
from shardwright.config import Config
from shardwright.testing import run_ranks
from shardwright.torch.units.dry_run import plan_model

LINK = Link(latency_s=1e-6, bandwidth_Bps=1e9)
CLUSTER = Cluster(device=Device(name="test"), ranks_per_node=2, intra_node=LINK, inter_node=LINK)
SETTINGS: dict[str, Any] = {"profile": "estimated", "run_dir": "off"}


class Whitened(nn.Module):
    """A batch norm of a script's own, with a running mean."""

    def __init__(self, width: int, *, is_whole: bool = False) -> None:
        super().__init__()
        self.scale, self.is_whole = nn.Parameter(torch.ones(width)), is_whole
        self.register_buffer("centre", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        mean = x.transpose(0, 1).reshape(x.shape[1], -1).mean(1)
        if self.training:
            self.centre.lerp_(mean.detach(), 0.1)
        if self.is_whole and bool((mean > 1e9).any()):  # reads a value, so that it is not split
            raise AssertionError
        return (x - mean) * self.scale


class Around(nn.Module):
    """A unit as a whole."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.out = inner, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


class Functional(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(super().forward(x), None, None, training=True)


class BatchNormAct(nn.BatchNorm1d):
    """As in timm: a batch norm with the activation behind it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Queue(nn.Module):
    """As in MoCo: keys of earlier batches, which are no statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)
        self.register_buffer("queue", torch.zeros(12, 8))

    def forward(self, x: Tensor) -> Tensor:
        keys = F.normalize(self.encoder(x), dim=1)
        logits = keys @ self.queue.clone().T
        self.queue.copy_(torch.cat([keys.detach(), self.queue])[:12])
        return F.pad(logits, (0, 0))[:, :8] + keys


def frozen(module: nn.Module) -> nn.Module:
    """Its statistics are kept, as in detection models."""
    return module.eval()


@pytest.mark.parametrize(
    ("layers", "found"),
    [
        ([nn.BatchNorm1d(8), nn.BatchNorm1d(8, affine=False)], ("1", "2")),
        ([BatchNormAct(8), nn.SyncBatchNorm(8)], ("1", "2")),
        ([frozen(nn.BatchNorm1d(8)), nn.LayerNorm(8), nn.Dropout(0.5)], ()),
        ([Whitened(8), Around(Whitened(8, is_whole=True))], ("1", "2.inner")),
        ([Around(Functional(8, 8))], ("1.inner",)),
        ([nn.utils.spectral_norm(nn.Linear(8, 8)), Around(Queue())], ()),
        ([nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))], ()),
        ([nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2), nn.Flatten()], ()),
        ([nn.Unflatten(1, (2, 4)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()], ("2",)),
    ],
    ids=lambda value: "-".join(type(each).__name__ for each in value) if isinstance(value, list) else "",
)
def test_layers_are_found(layers: list[nn.Module], found: tuple[str, ...]):
    model = nn.Sequential(nn.Linear(8, 8), *layers, nn.Linear(8, 1))
    assert sw.trace_model(model, torch.randn(6, 8)).batch_statistics == found


def pictures() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        nn.BatchNorm2d(4, momentum=None),
        nn.Flatten(),
        nn.Linear(100, 8),
        Whitened(8),
        nn.BatchNorm1d(8, affine=False),
        nn.Linear(8, 3),
    ).double()


def differences_to_the_whole_batch(settings: dict[str, Any]) -> list[float]:
    """Of losses, gradients and the state after two steps."""
    torch.manual_seed(0)
    model = pictures()
    plain = copy.deepcopy(model)
    sw.init({**SETTINGS, **settings})
    wrapped = sw.DistributedModel(model)
    mine = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
    theirs = torch.optim.SGD(plain.parameters(), 0.1)

    @sw.step
    def train_step(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    found = [0.0, 0.0]
    for _ in range(2):
        x, y = torch.randn(12, 1, 9, 9, dtype=torch.float64), torch.randint(0, 3, (12,))
        mine.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        loss = train_step(wrapped, x, y).reduce_mean()
        expected = F.cross_entropy(plain(x), y)
        expected.backward()
        own = dict(plain.named_parameters())
        gradients = [
            float((p.grad - own[name].grad).abs().max()) for name, p in wrapped.local_named_parameters()
        ]
        found = [max(found[0], abs(float((loss - expected).detach()))), max(found[1], *gradients)]
        mine.step()
        theirs.step()
    state = wrapped.state_dict()
    return [
        *found,
        max(float((state[name] - value).abs().max()) for name, value in plain.state_dict().items()),
    ]


def test_statistics_of_the_whole_batch():
    """A batch norm was trained over microbatches of few samples, and nothing could be done about it."""
    for found in run_ranks(differences_to_the_whole_batch, 2, {"microbatches": 1}):
        assert max(found) < 1e-12
    cut = run_ranks(differences_to_the_whole_batch, 2, {"microbatches": 4})
    assert min(min(found) for found in cut) > 1e-4  # the test can fail


def said_by_rank(settings: dict[str, Any]) -> list[str]:
    """What the library warns of while an evaluation and two steps run."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright").addHandler(handler)
    sw.init({**SETTINGS, **settings})
    model = sw.DistributedModel(pictures())

    @sw.step
    def step(model: Any, x: Tensor) -> Tensor:
        loss = model(x).mean()
        if torch.is_grad_enabled():
            model.backward(loss)
        return loss

    x = torch.randn(12, 1, 9, 9, dtype=torch.float64)
    with torch.no_grad():
        step(model, x)
    step(model, x)
    step(model, x)
    return [text for text in said if "statistics" in text]


def test_one_rank_says_once_whose_statistics_they_are():
    (text,), nothing = run_ranks(said_by_rank, 2, {"microbatches": 4})
    assert text.startswith(
        "4 layers (1, 4, 8 and 1 more) compute statistics over the 3 samples of a microbatch,"
    )
    assert "not over the 12 of the batch" in text
    assert not nothing
    assert len(run_ranks(said_by_rank, 1, {"microbatches": 2})[0]) == 1
    assert run_ranks(said_by_rank, 2, {"microbatches": 1}) == [[], []]


def test_a_model_that_cannot_be_called_with_one_sample():
    """The planner traced microbatches of one sample, too, which a batch norm refuses, and gave up."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    plan = plan_model(model, torch.randn(8, 8), config=Config(), world_size=2, cluster=CLUSTER)
    assert plan.schedule.microbatches == 2
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        plan_model(model, torch.randn(8, 8), config=Config(microbatches=8), world_size=2, cluster=CLUSTER)

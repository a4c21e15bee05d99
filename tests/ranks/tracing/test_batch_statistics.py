"""Statistics over the samples of a microbatch: found, said, and over the whole batch on demand."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright.torch as sw
from shardwright.testing import run_ranks

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

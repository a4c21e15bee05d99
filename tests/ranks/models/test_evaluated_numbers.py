"""The numbers of an evaluation are those of one process, whatever they are over samples."""

import copy
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import run_ranks

D = torch.float64
KINDS: dict[str, dict[str, Any]] = {
    "stages": {},
    "replicas": {"pipeline_parallel_degree": 1},
    "shards": {
        "pipeline_parallel_degree": 1,
        "sharded_data_parallel_degree": 2,
        "sdp_param_persistence_threshold": 1,
    },
    "parts of layers": {"tensor_parallel_degree": 2},
}
MODES: dict[str, Any] = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "grad": nullcontext}


class Encoder(nn.Module):
    """Returns what the loss of a variational autoencoder is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mean, self.spread = nn.Linear(6, 16), nn.Linear(16, 3), nn.Linear(16, 3)
        self.down = nn.Linear(3, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.up(x))
        mean = self.mean(h)
        return torch.sigmoid(self.down(mean)), mean, self.spread(h)


def _numbers(model: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    made, mean, spread = model(x)
    kld = -0.5 * torch.sum(1 + spread - mean.pow(2) - spread.exp())
    loss = F.binary_cross_entropy(made, x, reduction="sum")
    loss += kld
    return {
        "loss": loss,
        "nll": F.nll_loss(F.log_softmax(made, 1), y, reduction="sum"),
        "mean": F.mse_loss(made, x),
        "by samples": made.square().sum() / len(x),
        "cross entropy": F.cross_entropy(made, y),
        "right": (made.argmax(1) == y).to(D).mean(),
    }


def _differences(kind: str, mode: str, samples: int, trains_before: bool) -> dict[str, float]:
    """Of the numbers from those of one process with the samples of the replica."""
    sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 4, **KINDS[kind]})
    torch.manual_seed(0)
    net = Encoder().to(D)
    plain = copy.deepcopy(net)
    model = sw.DistributedModel(net)
    x, y = torch.rand(samples, 6, dtype=D), torch.arange(samples) % 6

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = _numbers(model, x, y)["mean"]
        model.backward(loss)
        return loss

    @sw.step
    def evaluate(model: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        return _numbers(model, x, y)

    if trains_before:
        train(model, x, y)
    model.eval()
    inside: AbstractContextManager[Any] = MODES[mode]()
    wrong = {}
    with inside:
        for _ in range(2):
            told, wanted = evaluate(model, x, y), _numbers(plain, x, y)
            for name, number in wanted.items():
                ours = float(told[name].reduce_mean().detach())
                if ours != pytest.approx(float(number.detach()), rel=1e-9):
                    wrong[name] = ours / float(number.detach())
    return wrong


@pytest.mark.parametrize(
    ("kind", "mode", "samples"),
    [
        ("stages", "no_grad", 10),
        ("replicas", "no_grad", 16),
        ("replicas", "grad", 10),
        ("shards", "inference", 10),
        ("stages", "grad", 16),
        ("parts of layers", "inference", 16),
    ],
)
def test_numbers_of_an_evaluation_are_those_of_the_batch(kind: str, mode: str, samples: int) -> None:
    """``reduce_mean`` of a sum over samples was that of one microbatch: 1/m of what one process tells."""
    assert run_ranks(_differences, 2, kind, mode, samples, mode != "grad") == [{}, {}]


def _stated() -> float:
    sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 4})
    model = sw.DistributedModel(Encoder())

    @sw.step(loss_reduction="mean")
    def evaluate(model: Any, x: Tensor) -> Tensor:
        return model(x)[0].new_ones(()) * len(x) + 0 * model(x)[0].sum()

    with torch.no_grad():
        return float(evaluate(model, torch.rand(16, 6)).reduce_mean())


def test_a_script_may_say_that_numbers_of_an_evaluation_are_means() -> None:
    assert run_ranks(_stated, 2) == [4.0, 4.0]


def _small_batches(schedule: str) -> float:
    """How losses and gradients of smaller batches differ from those of one process."""
    sw.init({"profile": "estimated", "run_dir": "off", "microbatches": 4, "pipeline": schedule})
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(6))).to(D)
    plain = copy.deepcopy(net)
    model = sw.DistributedModel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    plain_optimizer = torch.optim.SGD(plain.parameters(), 0.1)

    @sw.step
    def run(model: Any, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        if model.training:
            model.backward(loss)
        return loss

    worst = 0.0
    for samples in (8, 3, 1):
        x = torch.rand(samples, 6, dtype=D)
        optimizer.zero_grad()
        plain_optimizer.zero_grad()
        told, wanted = run(model.train(), x).reduce_mean(), plain(x).square().mean()
        wanted.backward()
        optimizer.step()
        plain_optimizer.step()
        with torch.no_grad():
            told_again, wanted_again = run(model.eval(), x).reduce_mean(), plain(x).square().mean()
        worst = max(worst, abs(float(told - wanted.detach())), abs(float(told_again - wanted_again)))
    return worst


def test_a_batch_smaller_than_the_ones_before_is_cut_into_fewer_microbatches() -> None:
    """The last batch of a loader, or one sample to evaluate, was refused."""
    assert max(run_ranks(_small_batches, 2, "1f1b")) < 1e-12

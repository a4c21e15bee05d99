"""A loss computes on the logits that each rank has: nobody gathers them, and the plan knows."""

import copy
from typing import NamedTuple
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.plan import TensorPrices
from shardwright.planner.fabric import Fabric
from shardwright.run.context import context
from shardwright.testing import run_ranks
from shardwright.torch.tensor_parallel.divide import settle_gradients
from shardwright.torch.tensor_parallel.divided_tensor import whole
from shardwright.torch.tensor_parallel.group import Traffic

# Not those of the day: whether the head is worth dividing would hang on the load of the machine.
PRICES = TensorPrices(latency_s=2e-5, bandwidth_Bps=2e9, flops_per_s=5e10, memory_Bps=1e10)

WORDS, WIDTH, SAMPLES, LENGTH, MICROBATCHES = 4099, 32, 4, 10, 2
LOGITS_BYTES = SAMPLES // MICROBATCHES * LENGTH * WORDS * 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def flat(logits: Tensor) -> Tensor:
    return logits.view(-1, WORDS)


def ignoring(logits: Tensor, ids: Tensor) -> Tensor:
    # Of 64 bits already: the same tensor.
    return F.cross_entropy(flat(logits.double()), ids.masked_fill(ids % 5 == 0, -100).view(-1))


def shifted(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[..., :-1, :].contiguous().view(-1, WORDS), ids[..., 1:].reshape(-1))


def in_32_bits(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(flat(logits.float()), ids.view(-1), reduction="sum") / ids.numel()


def smoothed(logits: Tensor, ids: Tensor) -> Tensor:
    ignored = ids.masked_fill(ids % 7 == 0, -1)
    return F.cross_entropy(flat(logits), ignored.view(-1), ignore_index=-1, label_smoothing=0.1)


def weighted(logits: Tensor, ids: Tensor) -> Tensor:
    weights = torch.linspace(0.5, 2.0, WORDS, dtype=torch.float64)
    return F.cross_entropy(flat(logits) / 0.7, ids.view(-1), weight=weights)


def of_each_token(logits: Tensor, ids: Tensor) -> Tensor:
    losses = F.nll_loss(F.log_softmax(logits, -1).transpose(1, 2), ids, reduction="none")
    return (losses * (ids % 3 > 0)).mean()


LOSSES = (ignoring, shifted, in_32_bits, smoothed, weighted, of_each_token)


class Outcome(NamedTuple):
    """Largest difference; bytes sent, planned and gathered."""

    difference: float
    sent: int
    planned: int
    gathered: int


def outcome(names: list[str]) -> dict[str, Outcome]:
    return {name: _outcome(WAYS[name]) for name in names}


def _outcome(way) -> Outcome:
    torch.manual_seed(0)
    plain = Model().double()
    settings = {"microbatches": MICROBATCHES, "profile": "estimated", "tensor_parallel_degree": 2}
    sw.init({"run_dir": "off", **settings})
    model = sw.DistributedModel(copy.deepcopy(plain))

    @sw.step
    def train(model, ids):
        loss, more = way(model(ids), ids)
        model.backward(loss)
        return loss, more

    ids = torch.randint(0, WORDS, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    with mock.patch.object(Fabric, "tensor_prices", PRICES):
        train(model, ids)
    model.zero_grad()
    group = dict(model.local_named_parameters())["head.weight"]._spec.group
    group.traffic = Traffic()

    def settled(parameters):
        """What is sent once a step is no part of the forwards and backwards."""
        before = group.traffic
        group.traffic = Traffic()
        settle_gradients(parameters)
        group.traffic = before

    with mock.patch("shardwright.torch.replicas.gradient_buckets.settle_gradients", settled):
        results = train(model, ids)
    sent = dict(group.traffic.sent_bytes)
    differences = [0.0]
    for index, part in enumerate(ids.chunk(MICROBATCHES)):
        loss, more = way(plain(part), part)
        differences.append(float((results[0].outputs[index] - loss).detach().abs().max()))
        if more is not None:
            differences.append(float((results[1].outputs[index] - more).detach().abs().max()))
    way(plain(ids), ids)[0].backward()
    for name, parameter in model.local_named_parameters():
        differences.append(float((whole(parameter.grad) - plain.get_parameter(name).grad).abs().max()))
    plan = context().plan
    planned = sum(stage.exchange_bytes for stage in plan.prediction.stages) * MICROBATCHES
    sw.shutdown()
    return Outcome(max(differences), sum(sent.values()), planned, sent.get("all_gather", 0))


def returning(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return ignoring(logits, ids), logits


def guessing(logits: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Who asks for the word gets whole logits."""
    return ignoring(logits, ids), logits.argmax(-1).double()


WAYS = {loss.__name__: (lambda logits, ids, loss=loss: (loss(logits, ids), None)) for loss in LOSSES}
WAYS |= {"returning": returning, "guessing": guessing}


def test_losses_compute_on_the_logits_that_a_rank_has():
    gathered_once = MICROBATCHES * (WORDS + 1) // 2 * LOGITS_BYTES // WORDS
    for found in run_ranks(outcome, 2, list(WAYS), timeout_s=200):
        differences = {name: one.difference for name, one in found.items()}
        assert all(each < (1e-6 if name == "in_32_bits" else 1e-12) for name, each in differences.items()), (
            found
        )
        assert all(one.sent == one.planned > 0 for one in found.values()), found
        gathered = {name: one.gathered // gathered_once for name, one in found.items()}
        assert gathered == {name: int(name in ("returning", "guessing")) for name in WAYS}, found

"""Tensors that are neither parameters nor buffers and outlive the step: attributes, variables of a script."""

from typing import Any

import pytest
import torch
from stacks import Stack, batches, start
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import WIDTH
from zoo_modules import Stack as Blocks

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

CONFIG = {"microbatches": 4, "profile": "estimated", "pipeline_parallel_degree": 2}


class RunningMean(Blocks):
    """Follows what the blocks make, in a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = torch.zeros(WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) - self.mean
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return self.head(x)


def build(kind: type[nn.Module]) -> Recipe:
    return Recipe(build=kind, batch=features, loss=classify)


REFUSED = "is written into a tensor that was there before the step function was called"


def test_tensors_in_attributes_cannot_be_written_on_one_rank():
    case = Case(config=CONFIG, iterations=[Iteration()])
    with pytest.raises(RanksFailedError, match=REFUSED) as caught:
        run_ranks(differences, 2, build(RunningMean), case)
    assert "test_lasting_tensors.py" in str(caught.value)


TOTAL = torch.zeros((), dtype=torch.float64)
COUNT = torch.zeros((), dtype=torch.int64)


def sums_in_a_global(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    model.backward(loss)
    TOTAL.add_(loss.detach())
    return loss


def fills_a_large_one() -> Any:
    features = torch.zeros(2**18, dtype=torch.float64)

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        features[:1] = loss.detach()
        return loss

    return step


class Metric(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))


def updates_a_metric() -> Any:
    metric = Metric()

    def step(model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        model.backward(loss)
        metric.total += loss.detach()
        return loss

    return step


WRITERS = {
    "a large one": fills_a_large_one,
    "a metric": updates_a_metric,
    "a global": lambda: sums_in_a_global,
}


@pytest.mark.parametrize(
    "name",
    ["a metric", "a global", "a large one"],
)
def test_variables_of_a_script_cannot_be_written_on_one_rank(name):
    def job() -> None:
        _, _, model = start(Stack, CONFIG)
        sw.step(WRITERS[name]())(model, batches(0, 1)[0])

    with pytest.raises(RanksFailedError, match=REFUSED):
        run_ranks(job, 2)


class Meter:
    def __init__(self) -> None:
        self.seen = 0
        self.sizes: list[int] = []


SEEN = {"samples": 0}


def test_what_a_script_counts_in_no_trace_is_counted_once_a_microbatch():
    def job() -> list[int]:
        _, _, model = start(Stack, CONFIG)
        meter, in_variable = Meter(), 0

        @sw.step
        def train(model: nn.Module, x: Tensor) -> Tensor:
            nonlocal in_variable
            if not sw.is_tracing():
                COUNT.add_(x.shape[0])
                SEEN["samples"] += x.shape[0]
                in_variable += x.shape[0]
                meter.seen += x.shape[0]
                meter.sizes.append(x.shape[0])
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        COUNT.zero_()
        SEEN["samples"] = 0
        for number in range(2):
            train(model, batches(number, 1)[0])
        return [int(COUNT), SEEN["samples"], in_variable, meter.seen, sum(meter.sizes)]

    assert run_ranks(job, 2) == [[16] * 5, [16] * 5]


def test_a_trained_tensor_of_a_script_is_pointed_out():
    def job() -> None:
        _, _, model = start(Stack, CONFIG)
        temperature = torch.ones((), dtype=torch.float64, requires_grad=True)

        @sw.step
        def train(model: nn.Module, x: Tensor) -> Tensor:
            loss = (model(x) * temperature).square().mean()
            model.backward(loss)
            return loss

        train(model, batches(0, 1)[0])

    with pytest.raises(RanksFailedError, match=r"a trained tensor of shape \(\) is used here"):
        run_ranks(job, 2)

"""Numbers among the arguments of a step function: each was a trace of its own, whatever became of it."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from sharded import QUIET, Net, batches, loss_of
from torch import Tensor

import shardwright.torch as sw
from shardwright.testing import run_ranks
from shardwright.torch.execution import program_maker

STEPS = 12
shown: list[str] = []


def ignores(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y)
    model.backward(loss)
    return loss, step


def weighs(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y) * (1 / (1 + step))
    model.backward(loss)
    return loss, None


def ignores_an_array(model: Any, x: Tensor, y: Tensor, step: int, array: Any) -> Any:
    """The first rank sends it to the others, which have another object in each step."""
    return ignores(model, x, y, step)[0], None


def train(function: Callable[..., Any], **settings: Any) -> Any:
    """The results of each step, and in which of them anything was traced."""
    shown.clear()
    num_traces, plain_trace = 0, program_maker.trace_step

    def trace_step(*args: Any, **kwargs: Any) -> Any:
        nonlocal num_traces
        num_traces += 1
        return plain_trace(*args, **kwargs)

    program_maker.trace_step = trace_step
    sw.init({**QUIET, "microbatches": 2, **settings})
    torch.manual_seed(0)
    model = sw.DistributedModel(Net().double())
    optimizer = sw.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01))
    step = sw.step(function)
    results, traced = [], []
    (x, y), *_ = batches(1)
    more = (np.ones(2),) if function is ignores_an_array else ()
    for number in range(STEPS):
        num_traces = 0
        optimizer.zero_grad()
        loss, passed = step(model, x, y, number, *more)
        results.append(([each.item() for each in loss.outputs], passed if passed is None else list(passed)))
        optimizer.step()
        if num_traces:
            traced.append(number)
    return results, traced, list(shown), model.state_dict()


def test_what_it_costs_is_told_once_with_its_line() -> None:
    def run() -> list[str]:
        told: list[str] = []
        handler = logging.Handler()
        handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("shardwright").addHandler(handler)
        train(weighs, pipeline_parallel_degree=2)
        return [text for text in told if "was traced" in text]

    first, second = run_ranks(run, 2)
    assert not second
    (text,) = first
    assert "test_numbers_as_arguments.py:" in text
    assert "(0, 1, 2, 3, 4, 5, 6, 7)" in text


def test_weights_of_losses_may_be_numbers() -> None:
    """A float that goes into an operation holds for itself alone, and is right in every step."""

    def step(model: Any, x: Tensor, y: Tensor, number: int) -> Any:
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten()) * max(0.1, 1 - number / 8)
        model.backward(loss)
        return loss, None

    plain = run_ranks(train, 1, step)[0]
    for found in run_ranks(train, 2, step, pipeline_parallel_degree=2):
        torch.testing.assert_close(found[0], plain[0], rtol=1e-12, atol=1e-14)

"""Numbers among the arguments of a step function: each was a trace of its own, whatever became of it."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sharded import QUIET, Net, batches, loss_of
from torch import Tensor

from choices import in_sweep, thorough
from shardwright.testing import run_ranks

STEPS = 12
RATES = [0.5, 1.0, 2.0]
shown: list[str] = []


def ignores(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y)
    model.backward(loss)
    return loss, step


def asks(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y)
    if step % 5 == 4 or step == 1:
        loss = loss * 2
    model.backward(loss)
    return loss, None


def reads_now_and_then(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y)
    if step % 4 == 0:
        shown.append(f"step {step}: {loss.item():.3f}")
    model.backward(loss)
    return loss, None


def weighs(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y) * (1 / (1 + step))
    model.backward(loss)
    return loss, None


def looks_up(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y) * RATES[step % len(RATES)]
    model.backward(loss)
    return loss, None


def asks_on_one_rank(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    import shardwright.torch as sw

    loss = loss_of(model, x, y)
    if sw.rank() == 1 and step % 4 == 3:
        text = f"step {step}"
        if not sw.is_tracing():
            shown.append(text)
    model.backward(loss)
    return loss, None


def asks_for_its_type(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    loss = loss_of(model, x, y)
    if type(step) is int:
        loss = loss * 2
    model.backward(loss)
    return loss, None


def asks_for_its_type_first(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    """What follows was not asked of a watched number, whose trace seemed to hold for all numbers."""
    loss = loss_of(model, x, y)
    if type(step) is int and step % 5 == 4:
        loss = loss * 2
    model.backward(loss)
    return loss, None


def divides(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    try:
        weight = 1 / (step - 6)
    except ZeroDivisionError:
        weight = None
    loss = loss_of(model, x, y)
    if weight is None:
        loss = loss * 2
    model.backward(loss)
    return loss, None


def catches_everything(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    try:
        rate = RATES[step]
    except:  # noqa: E722
        rate = 3.0
    loss = loss_of(model, x, y) * rate
    model.backward(loss)
    return loss, None


def ignores_an_array(model: Any, x: Tensor, y: Tensor, step: int, array: Any) -> Any:
    """The first rank sends it to the others, which have another object in each step."""
    return ignores(model, x, y, step)[0], None


def reads_an_array_on_one_rank(model: Any, x: Tensor, y: Tensor, step: int) -> Any:
    """That rank cannot follow what it read, and traces each microbatch; the other would not have to."""
    import shardwright.torch as sw

    if sw.rank() == 0:
        shown.append(str(x.numpy().sum()))
    loss = loss_of(model, x, y)
    model.backward(loss)
    return loss, None


def train(function: Callable[..., Any], **settings: Any) -> Any:
    """The results of each step, and in which of them anything was traced."""
    import shardwright.torch as sw
    from shardwright.torch.execution import program_maker

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


EVERY = list(range(1, STEPS))


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (ignores, [1]),
        pytest.param(asks, [1, 2, 4], marks=pytest.mark.sweep),  # 1 is asked for first, and found to be so
        thorough(reads_now_and_then, [1, 4, 8]),
        # As in `test_what_it_costs_is_told_once_with_its_line`.
        pytest.param(weighs, EVERY, marks=pytest.mark.sweep),
        (looks_up, [1, 2, 3]),
        (asks_on_one_rank, [1, 3, 7, 11]),
        pytest.param(asks_for_its_type, EVERY, marks=pytest.mark.sweep),
        pytest.param(asks_for_its_type_first, EVERY, marks=pytest.mark.sweep),
        in_sweep(divides, [1, 6]),
        pytest.param(catches_everything, EVERY, marks=pytest.mark.sweep),
        pytest.param(ignores_an_array, [1], marks=pytest.mark.sweep),
        in_sweep(reads_an_array_on_one_rank, [0, *EVERY]),
    ],
    ids=lambda item: getattr(item, "__name__", None),
)
def test_a_step_is_traced_again_where_a_number_makes_a_difference(function: Any, expected: list[int]) -> None:
    plain = run_ranks(train, 1, function)[0]
    for rank, found in enumerate(run_ranks(train, 2, function, pipeline_parallel_degree=2)):
        torch.testing.assert_close(found[0], plain[0], rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found[3], plain[3], rtol=1e-12, atol=1e-14)
        # Where one rank asks, the other has nothing to trace.
        assert found[1] == (expected if rank or function is not asks_on_one_rank else [1])
        if function is reads_now_and_then:
            assert found[2] == plain[2]
        if function is asks_on_one_rank:
            assert found[2] == [f"step {step}" for step in (3, 7, 11) for _ in range(2)] * (rank == 1)


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

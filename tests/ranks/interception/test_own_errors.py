"""Errors that the model or the script raises itself are shown as its own, with line and layer, on all ranks.

They came as "the model cannot be traced: on tensors without data it raises ...".
"""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from sharded import QUIET
from stacks import train as squares
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

import shardwright.torch as sw
from shardwright.testing import run_ranks, run_ranks_outcomes


class Block(nn.Module):
    def __init__(self, fault: Callable[[Tensor], Any] | None):
        super().__init__()
        self.linear = nn.Linear(9 if fault is wrong_width else 8, 8)
        self.fault = fault

    def forward(self, x: Tensor) -> Tensor:
        if self.fault is not None:
            self.fault(x)
        return x + torch.tanh(self.linear(x))


def wrong_width(x: Tensor) -> None:
    """The layer's own size is the fault."""


def key(x: Tensor) -> None:
    raise KeyError("no such layer")


def insists(x: Tensor) -> None:
    assert x.shape[-1] == 7, "the width must be 7"


def calls_what_is_not(x: Tensor) -> None:
    x.nothing()


FAULTS: dict[Any, tuple[type[Exception], str, str]] = {
    wrong_width: (RuntimeError, "shapes cannot be multiplied (4x8 and 9x8)", "2.linear (Linear)"),
    key: (KeyError, "no such layer", "2 (Block)"),
    insists: (AssertionError, "the width must be 7", "2 (Block)"),
    calls_what_is_not: (AttributeError, "nothing", "2 (Block)"),
}


def raised(fault: Any, loss_of: Callable[[Tensor, Tensor], Tensor]) -> tuple[type[Exception], str, str]:
    """Type, text and note of what the first step raises."""
    sw.init({**QUIET, "microbatches": 2})
    model = sw.DistributedModel(nn.Sequential(*(Block(fault if i == 2 else None) for i in range(4))))

    @sw.step
    def train(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model(x), y)
        model.backward(loss)
        return loss

    try:
        train(model, torch.ones(8, 8), torch.zeros(8, dtype=torch.long))
    except Exception as error:
        return type(error), str(error), " ".join(getattr(error, "__notes__", ()))
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_error_of_a_layer_is_its_own(fault: Any) -> None:
    kind, said, layer = FAULTS[fault]
    for found, text, note in run_ranks(raised, 2, fault, F.cross_entropy):
        assert found is kind
        assert said in text
        assert "test_own_errors.py:" in note
        assert f"in {layer}." in note


def loss_of_another_type(logits: Tensor, y: Tensor) -> Tensor:
    return F.nll_loss(logits, y.float())


def test_an_error_of_the_loss_is_its_own() -> None:
    for found, text, note in run_ranks(raised, 2, None, loss_of_another_type):
        assert found is RuntimeError
        assert "Expected" in text or "expected" in text
        assert "test_own_errors.py:" in note


class OfAnotherType(nn.Linear):
    """Runs on tensors without data, and on none with data."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(torch.float32 if is_fake(x) else torch.float64))


def train_with_a_layer_that_fails_in_the_run() -> None:
    """The error has what was logged when the layers were timed as a further note."""
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("shardwright.run.profiler").addHandler(handler)
    sw.init({**QUIET, "microbatches": 2, "profile": "measured"})
    model = sw.DistributedModel(nn.Sequential(OfAnotherType(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)))
    train = sw.step(squares)
    try:
        train(model, torch.ones(8, 8))
    except Exception as error:
        raise Told(list(getattr(error, "__notes__", ())), logged) from None


class Told(Exception):
    """Notes of an error, and lines of a log."""


def test_an_error_that_only_real_data_shows_has_its_layer_too() -> None:
    """PyTorch's words alone do not tell which layer it was; the timing spoke of Linear-08528a4ca306 twice."""
    outcomes = run_ranks_outcomes(train_with_a_layer_that_fails_in_the_run, 2)
    ((note,), (line,)), (_, nothing) = (outcome.exception.args for outcome in outcomes)
    assert note.startswith("It is the script's or the model's own error: at ")
    assert note.endswith("in 0 (OfAnotherType).")
    assert line.startswith("0 (OfAnotherType) cannot be run on random data (RuntimeError: mat1 and mat2 must")
    assert not nothing

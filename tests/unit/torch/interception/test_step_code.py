"""Which step functions have calls that may read tensors, by their code; what is no loss to train by."""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.torch.interception.backward_calls import refuse_no_tensor
from shardwright.torch.interception.step_code import ReadingStep, asks_for_types


def helper(loss: Tensor) -> Any:
    """Of the same file."""
    return loss.item()


def quiet(loss: Tensor) -> Tensor:
    """Reads nothing."""
    return loss.mean() * 2


def decorated(function: Callable[..., Any]) -> Callable[..., Any]:
    """Has the function in a cell."""

    def inner(loss: Tensor) -> Any:
        return function(loss)

    return inner


READ: dict[str, Callable[..., Any]] = {
    "item": lambda loss: loss.item(),
    "print": lambda loss: print(loss),
    "a helper": lambda loss: helper(loss),
    "inside": lambda losses: [float(loss) for loss in losses],
    "around": decorated(helper),
    "partial": functools.partial(helper),
}
READ_NOTHING: dict[str, Callable[..., Any]] = {
    "mean": quiet,
    "a helper": lambda loss: quiet(loss),
    "around": decorated(quiet),
    "an error message": lambda x: f"bad shape {tuple(x.shape)}",
    "no Python code": len,
}


class Remote:
    """Fetches attributes when it is asked for them, or cannot."""

    asked: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise OSError("the server does not answer")

    @property
    def __class__(self) -> Any:  # isinstance() asks for it
        return self.__getattr__("__class__")


def test_what_a_function_has_is_not_asked_for_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of an object in a cell was that of the decorator, and a proxy asked its server."""
    remote = Remote()
    # Not a variable of this file: pytest looks for examples there, and asks it for attributes.
    monkeypatch.setitem(globals(), "REMOTE", Remote())

    def uses(loss: Tensor) -> Any:
        return loss, remote, REMOTE  # type: ignore[name-defined]  # noqa: F821

    assert not ReadingStep(uses).may_read
    assert Remote.asked == []


class Trainer:
    """Has a step in a method."""

    def reads(self, loss: Tensor) -> Any:
        """Its own code does."""
        return loss.item()


READ |= {
    "a method": Trainer().reads,
    "a method around": decorated(Trainer().reads),
    "a wrapper": functools.wraps(helper)(lambda loss: None),
}


@pytest.mark.parametrize("name", READ)
def test_those_that_read_are_found(name: str) -> None:
    assert ReadingStep(READ[name]).may_read


@pytest.mark.parametrize("name", READ_NOTHING)
def test_those_that_do_not_are_not(name: str) -> None:
    assert not ReadingStep(READ_NOTHING[name]).may_read


def test_who_asks_for_a_type_is_found() -> None:
    def converts(loss: Tensor) -> Any:
        return loss.type(torch.float64)

    def asks(loss: Tensor, number: Any) -> Any:
        return loss if type(number) is int else None

    assert not asks_for_types(converts)
    assert asks_for_types(asks)
    assert asks_for_types(ReadingStep(lambda loss: asks(loss, 1)))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (0.25, r"gets the float 0\.25, but.*Write model\.backward\(loss\)\. Numbers, as of loss\.item\(\)"),
        (None, r"gets an object of the type NoneType, but.*Write model\.backward\(loss\)\.$"),
        (
            SimpleNamespace(loss=torch.ones(())),
            r"type SimpleNamespace.*Write model\.backward\(output\.loss\)",
        ),
    ],
)
def test_what_is_no_tensor_is_named_with_the_line_to_write(given, message):
    """A number ended in ``'float' object has no attribute 'numel'``."""
    with pytest.raises(UsageError, match=message):
        refuse_no_tensor(given)


def test_a_tensor_passes():
    refuse_no_tensor(torch.ones(()))

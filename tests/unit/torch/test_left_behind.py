"""What forwards keep outside of modules must not be a fake tensor when a trace has ended."""

from functools import cache, lru_cache
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

from shardwright.torch.discover import discover
from shardwright.torch.left_behind import NothingLeftBehind

_TABLES: dict[int, Tensor] = {}


@lru_cache(maxsize=2)
def bounded(length: int) -> Tensor:
    return torch.arange(length) * 0.1


@cache
def unbounded(length: int) -> tuple[Tensor, int]:
    return torch.arange(length) * 0.1, length


class Helper:
    tables: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        self.last: Tensor | None = None
        self.all: list[Tensor] = []

    def __call__(self, length: int) -> Tensor:
        self.last = torch.arange(length) * 0.1
        self.all.append(self.last)
        self.tables[length] = self.last
        return self.last


class KeepsEverywhere(nn.Module):
    by_length: ClassVar[dict[int, Tensor]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.helper = Helper()
        self.nested = {"tables": [torch.zeros(1)]}
        self.own_cache = lru_cache(maxsize=4)(self.compute)

    def compute(self, length: int) -> Tensor:
        return torch.arange(length) * 0.1

    def forward(self, x: Tensor) -> Tensor:
        table = bounded(4) + unbounded(4)[0] + self.helper(4) + self.own_cache(4)
        _TABLES[4] = self.by_length[4] = table
        type(self).last = table
        self.nested["tables"].append(table)
        return self.layer(x + table)


def test_no_fake_tensor_is_left():
    model = KeepsEverywhere()
    real = bounded(3)
    discover(model, lambda x: model(x).sum(), ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert not _TABLES
    assert not KeepsEverywhere.by_length
    assert not hasattr(KeepsEverywhere, "last")
    assert model.helper.last is None
    assert model.helper.all == []
    assert model.nested["tables"] == [torch.zeros(1)]
    for table in (bounded(4), unbounded(4)[0], model.own_cache(4)):
        assert type(table) is Tensor
    assert torch.equal(bounded(3), real)
    torch.testing.assert_close(model(torch.zeros(2, 4)), model.layer(0.4 * torch.arange(4).expand(2, 4)))


def test_what_was_there_stays():
    model = KeepsEverywhere()
    model(torch.zeros(2, 4))
    before, cached = _TABLES[4], bounded(4)
    with NothingLeftBehind(model, model.forward):
        bounded(5)
    assert _TABLES.pop(4) is before
    assert bounded(4) is cached
    KeepsEverywhere.by_length.clear()
    del KeepsEverywhere.last


def test_a_cache_that_was_made_late_is_found():
    model = KeepsEverywhere()
    with NothingLeftBehind(model, model.forward):
        pass
    other = KeepsEverywhere()
    discover(other, lambda x: other(x).sum(), ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert type(other.own_cache(4)) is Tensor


@pytest.mark.parametrize("length", [3, 5000])
def test_long_lists_are_left_alone(length):
    model = KeepsEverywhere()
    model.numbers = list(range(length))
    guard = NothingLeftBehind(model, model.forward)
    assert any(items is model.numbers for items, _ in guard._lists) == (length == 3)

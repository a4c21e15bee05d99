"""A trace leaves no stand-in anywhere, and what a model holds as it was; scripts count every run."""

import random
from collections import defaultdict, deque
from functools import cache, lru_cache
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.torch.python_state.left_behind import NothingLeftBehind
from shardwright.torch.units.model_traces import discover

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
    num_calls = 0

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
        KeepsEverywhere.num_calls += 1
        self.nested["tables"].append(table)
        return self.layer(x + table)


@pytest.fixture(autouse=True)
def nothing_kept():
    """Take back what forwards that really ran have kept, since the order of the tests is drawn."""
    yield
    _TABLES.clear()
    KeepsEverywhere.by_length.clear()
    KeepsEverywhere.num_calls = 0
    if hasattr(KeepsEverywhere, "last"):
        del KeepsEverywhere.last
    Helper.tables.clear()
    Counts.seen.clear()
    Counts.calls = 0
    HISTORY["size"].clear()
    LOG.by_name["size"].clear()
    bounded.cache_clear()
    unbounded.cache_clear()


def test_no_fake_tensor_is_left():
    model = KeepsEverywhere()
    real = bounded(3)
    discover(model, lambda x: model(x).sum(), ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert not _TABLES
    assert not KeepsEverywhere.by_length
    assert not hasattr(KeepsEverywhere, "last")
    assert KeepsEverywhere.num_calls > 0
    assert model.helper.last is None
    assert model.helper.all == []
    assert model.nested["tables"] == [torch.zeros(1)]
    for table in (bounded(4), unbounded(4)[0], model.own_cache(4)):
        assert type(table) is Tensor
    assert torch.equal(bounded(3), real)
    torch.testing.assert_close(model(torch.zeros(2, 4)), model.layer(0.4 * torch.arange(4).expand(2, 4)))


class Counts:
    """A class of the script: no module, and in no attribute of one."""

    calls = 0
    seen: ClassVar[list[int]] = []


class Inherits(Counts):
    pass


def test_a_class_of_the_script_counts_every_run_and_keeps_no_stand_in():
    class Inside:
        calls = 0

    model, num_runs = nn.Linear(4, 4), 0

    def step(x):
        nonlocal num_runs
        num_runs += 1
        Counts.calls += 1
        Counts.seen.append(len(x))
        Inside.calls += 1
        Inherits.last = Inside.last = model(x).sum()
        return Inside.last

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert num_runs > 0
    assert (Counts.calls, Counts.seen, Inside.calls) == (num_runs, [2] * num_runs, num_runs)
    assert not hasattr(Inherits, "last")
    assert not hasattr(Inside, "last")


def test_a_script_can_tell_a_trace_from_a_run():
    model, counter, marks = nn.Linear(4, 4), 0, []

    def step(x):
        nonlocal counter
        marks.append(sw.is_tracing())
        if not sw.is_tracing():
            counter += 1
        return model(x).sum()

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert marks
    assert all(marks)
    assert not sw.is_tracing()
    step(torch.zeros(2, 4))
    assert counter == 1


def test_what_a_step_keeps_of_units_in_a_list_of_the_script_is_taken_out():
    """The stand-in of the trace stayed first in the list: one loss more than there were microbatches."""
    model, losses, newest = nn.Linear(4, 4), ["of before"], {}

    def step(x):
        loss = model(x).sum()
        losses.append(loss.detach())
        newest["loss"] = loss
        return loss

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert losses == ["of before"]
    assert newest == {}


HISTORY: dict[str, list] = {"loss": [], "size": []}


class Log:
    def __init__(self) -> None:
        self.rows: list = []
        self.by_name: dict[str, list] = {"size": []}


LOG = Log()


class Slotted:
    __slots__ = ("count", "last", "rows")

    def __init__(self) -> None:
        self.count = 0
        self.rows: list = []


class Metric(nn.Module):
    """Not of the model that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1))
        self.count = 0


def test_other_kinds_of_variables_count_every_run_and_keep_no_stand_in():
    """A deque kept stand-ins."""
    model, metric, slotted, table = nn.Linear(4, 4), Metric(), Slotted(), np.zeros(3)
    newest: deque = deque([1.0], maxlen=2)
    seen, mean, num_runs = {"a"}, 0.5, 0

    def step(x):
        nonlocal mean, num_runs
        num_runs += 1
        loss = model(x).sum()
        newest.extend([len(x), loss.detach()])
        seen.add("b")
        seen.add(loss)
        mean = 0.9 * mean + 0.1 * loss.detach()
        table[1] += 1
        metric.count += 1
        metric.total += 1
        slotted.count += 1
        slotted.last = loss
        slotted.rows.append(len(x))
        return loss

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert newest == deque([1.0])
    assert (seen, mean, table.tolist()) == ({"a"}, 0.5, [0, num_runs, 0])
    assert (metric.count, metric.total.item()) == (num_runs, num_runs)
    assert (slotted.count, slotted.rows, hasattr(slotted, "last")) == (num_runs, [2] * num_runs, False)


def test_generators_of_the_script_are_where_they_were():
    """Losses had random numbers that a plain loop would have drawn later, without a word."""
    model = nn.Linear(4, 4)
    python, numpy, legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)

    def draw():
        return python.random(), float(numpy.random()), float(legacy.rand())

    def step(x):
        return model(x).sum() * sum(draw())

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    found = draw()
    python, numpy, legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
    assert found == draw()


def test_what_was_there_stays():
    model = KeepsEverywhere()
    model(torch.zeros(2, 4))
    before, cached = _TABLES[4], bounded(4)
    with NothingLeftBehind(model, model.forward):
        bounded(5)
    assert _TABLES[4] is before
    assert bounded(4) is cached


class Record:
    def __init__(self, loss: Tensor) -> None:
        self.loss = loss


def test_lists_inside_of_other_variables_and_of_arguments_have_no_stand_ins():
    model, by_name, given, records = nn.Linear(4, 4), defaultdict(list), Log(), ["of before"]

    def step(x, log):
        loss = model(x).sum()
        for each in (HISTORY["size"], LOG.by_name["size"], by_name["size"], log.by_name["size"]):
            each.append(len(x))
        for rows in (LOG.rows, log.rows):
            rows.append((1, "row", loss))
        HISTORY["loss"].append(loss.detach())
        records.append(Record(loss))
        by_name["loss"].append({"newest": loss})
        return loss

    discover(model, step, ((torch.zeros(2, 4), given), {}), device=torch.device("cpu"))
    sizes = HISTORY["size"]
    assert sizes
    assert {"loss": [], "size": sizes} == HISTORY
    assert records == ["of before"]
    assert by_name == {"size": sizes}
    for log in (LOG, given):
        assert (log.rows, log.by_name) == ([], {"size": sizes})

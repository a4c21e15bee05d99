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
from shardwright.errors import TraceError
from shardwright.torch.python_state.left_behind import NothingLeftBehind
from shardwright.torch.pytorch.tensors import TensorContents
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


def test_an_array_of_the_model_that_a_step_makes_longer_is_as_long_as_it_was():
    """A trace ended on NumPy's error."""
    model = nn.Linear(4, 4)
    model.table = np.ones(3)

    def step(x):
        model.table.resize(5, refcheck=False)
        return model(x).sum()

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert model.table.tolist() == [1, 1, 1]


def test_what_was_there_stays():
    model = KeepsEverywhere()
    model(torch.zeros(2, 4))
    before, cached = _TABLES[4], bounded(4)
    with NothingLeftBehind(model, model.forward):
        bounded(5)
    assert _TABLES[4] is before
    assert bounded(4) is cached


def test_a_cache_that_was_made_late_is_found():
    model = KeepsEverywhere()
    with NothingLeftBehind(model, model.forward):
        pass
    other = KeepsEverywhere()
    discover(other, lambda x: other(x).sum(), ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert type(other.own_cache(4)) is Tensor


class Lazy(dict):
    """A mapping that does things when it is read."""

    def values(self):
        raise RuntimeError("imports everything")

    __iter__ = keys = items = values


LAZY = Lazy(a=1)


def trace(model):
    discover(model, lambda x: model(x).sum(), ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))


def test_mappings_of_other_kinds_are_not_read():
    model = KeepsEverywhere()
    model.lazy = LAZY
    trace(model)


@pytest.mark.thorough
def test_many_objects_do_not_take_long():
    model = KeepsEverywhere()
    model.ids = list(range(1_000_000))
    model.samples = [[list(range(20)) for _ in range(1000)] for _ in range(100)]
    guard = NothingLeftBehind(model, model.forward)
    with guard:
        assert len(guard.of_model._before) + len(guard._of_script._before) < 30_000
        model.helper.last = torch.zeros(1)
    assert model.helper.last is None


class CountsEverywhere(nn.Module):
    """In tensors that share memory, in views of one entry many times, in numbers of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.calls = torch.zeros(1)
        self.views = [self.calls.expand(8), self.calls.view(1, 1)]
        self.helper = Helper()
        self.helper.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        self.views[1].add_(1)
        self.helper.number += 1
        return self.layer(x + self.views[0].sum())


def test_a_trace_does_not_count():
    model = CountsEverywhere()
    trace(model)
    assert model.calls.item() == 0
    assert model.helper.number == 0
    trace(model)
    assert model.views[0].tolist() == [0.0] * 8


def test_a_large_tensor_is_watched():
    large, small = torch.zeros(100), torch.zeros(2)
    contents = TensorContents(most_bytes=40)
    contents.keep(large)
    contents.keep(small)
    small.add_(1)
    contents.restore()
    assert small.tolist() == [0, 0]
    large.add_(1)
    error = contents.restore()
    assert isinstance(error, TraceError)
    assert "too large to be put back" in str(error)


class Proxy:
    """Stands for something that is not there yet, as a request of a web framework does."""

    def _missing(self, *_):
        raise RuntimeError("there is nothing yet")

    __class__ = property(_missing)  # type: ignore[assignment]
    __dict__ = property(_missing)  # type: ignore[assignment]
    __eq__ = __hash__ = __len__ = __getattr__ = _missing  # type: ignore[assignment]


class NoNamespace:
    __slots__ = ()

    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


PROXIES = [Proxy(), NoNamespace()]


def test_objects_that_fail_when_they_are_asked_are_left_alone():
    """A trace of a script with such a variable failed."""
    model, proxies = nn.Linear(4, 4), {"one": PROXIES[0], "other": PROXIES[1]}

    def step(x):
        assert len(proxies) == len(PROXIES) == 2
        return model(x).sum()

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))

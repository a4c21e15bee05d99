"""What forwards keep outside of modules must not be a fake tensor when a trace has ended."""

import random
from collections import defaultdict, deque
from fractions import Fraction
from functools import cache, lru_cache
from typing import ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import TraceError
from shardwright.torch.python_state.left_behind import NothingLeftBehind
from shardwright.torch.pytorch.tensor_contents import TensorContents
from shardwright.torch.units.module_costs import discover

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
    bounded.cache_clear()
    unbounded.cache_clear()


def test_no_fake_tensor_is_left():
    model = KeepsEverywhere()
    real = bounded(3)
    discover(model, lambda x: model(x).sum(), ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert not _TABLES
    assert not KeepsEverywhere.by_length
    assert not hasattr(KeepsEverywhere, "last")
    assert KeepsEverywhere.num_calls == 0
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


def test_counts_in_classes_of_the_script_are_put_back():
    """Each trace counted once more, so that the script counted a step too much."""

    class Inside:
        calls = 0

    model = nn.Linear(4, 4)

    def step(x):
        Counts.calls += 1
        Inherits.calls = Counts.calls
        Counts.seen.append(len(x))
        Inside.calls += 1
        return model(x).sum()

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert (Counts.calls, Counts.seen, Inside.calls) == (0, [], 0)
    assert "calls" not in vars(Inherits)


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


def test_lists_inside_of_other_variables_and_of_arguments_are_as_they_were():
    """They had entries of each trace: statistics of a script were of more microbatches than there were."""
    model, by_name, given, mixed = nn.Linear(4, 4), defaultdict(list), Log(), []

    def step(x, log):
        loss = model(x).sum()
        for each in (HISTORY["size"], LOG.by_name["size"], by_name["size"], log.by_name["size"]):
            each.append(len(x))
        for rows in (LOG.rows, log.rows):
            rows.append((1, "row", len(x)))
        HISTORY["loss"].append(loss.detach())
        mixed.extend([1, object(), 2])
        return loss

    discover(model, step, ((torch.zeros(2, 4), given), {}), device=torch.device("cpu"))
    assert HISTORY == {"loss": [], "size": []}
    assert not by_name
    for log in (LOG, given):
        assert (log.rows, log.by_name) == ([], {"size": []})
    assert [type(each) for each in mixed[:3]] == [int, object, int]  # who knows what the object is for


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


def test_what_a_step_counts_in_other_kinds_of_variables_is_as_it_was():
    """A step counted four microbatches too many in each of them, and in a deque it left stand-ins."""
    model, metric, slotted, table = nn.Linear(4, 4), Metric(), Slotted(), np.zeros(3)
    newest: deque = deque([1.0], maxlen=2)
    seen, kept = {"a"}, {"pair": (0, 0), "exact": Fraction(0), "array": np.float32(0)}
    rows: list = [0]

    def step(x):
        nonlocal rows
        loss = model(x).sum()
        newest.extend([len(x), loss.detach()])
        seen.add("b")
        seen.discard("a")
        rows = [*rows, len(x)]
        kept["pair"] = (kept["pair"][0] + 1, len(x))
        kept["exact"] += 1
        kept["array"] += 1
        table[1] += 1
        metric.count += 1
        metric.total += 1
        slotted.count += 1
        slotted.last = loss
        slotted.rows.append(len(x))
        return loss

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert newest == deque([1.0])
    assert (seen, rows, table.tolist()) == ({"a"}, [0], [0, 0, 0])
    assert kept == {"pair": (0, 0), "exact": 0, "array": 0}
    assert (metric.count, metric.total.item()) == (0, 0)
    assert (slotted.count, slotted.rows, hasattr(slotted, "last")) == (0, [], False)


def test_what_a_step_takes_out_of_a_variable_is_there_again():
    """Losses had the weights of later microbatches, without a word; a list lost its last entries."""
    model, weights, by_name, handles = (
        nn.Linear(4, 4),
        [1.0, 2.0, 3.0],
        {"a": 1, "b": 2},
        [object(), object()],
    )
    before = list(handles)

    def step(x):
        handles.pop()
        return model(x).sum() * weights.pop(0) * by_name.pop(next(iter(by_name)))

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert weights == [1.0, 2.0, 3.0]
    assert list(by_name.items()) == [("a", 1), ("b", 2)]
    assert handles == before


def test_generators_of_the_script_are_where_they_were():
    """Losses had random numbers that a plain loop would have drawn later, without a word."""
    model = nn.Linear(4, 4)
    python, numpy, legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
    num_draws = 0

    def draw():
        nonlocal num_draws
        num_draws += 1
        return python.random(), float(numpy.random()), float(legacy.rand())

    def step(x):
        return model(x).sum() * sum(draw())

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert num_draws == 0  # a variable of a function that the step calls
    found = draw()
    python, numpy, legacy = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
    assert found == draw()


def test_an_array_that_a_step_makes_longer_is_as_long_as_it_was():
    """A trace ended on NumPy's error."""
    model, tables = nn.Linear(4, 4), [np.ones(3)]

    def step(x):
        tables[0].resize(5, refcheck=False)
        return model(x).sum()

    discover(model, step, ((torch.zeros(2, 4),), {}), device=torch.device("cpu"))
    assert tables[0].tolist() == [1, 1, 1]


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


def test_many_objects_do_not_take_long():
    model = KeepsEverywhere()
    model.ids = list(range(1_000_000))
    model.samples = [[list(range(20)) for _ in range(1000)] for _ in range(100)]
    guard = NothingLeftBehind(model, model.forward)
    with guard:
        assert len(guard._owned) + len(guard._shared) < 30_000
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

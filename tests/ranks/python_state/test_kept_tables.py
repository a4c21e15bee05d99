"""Tables that code between units computes once and keeps: later microbatches take another path."""

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import Stack

from shardwright.testing import RanksFailedError, run_ranks

KINDS = ("1f1b", "interleaved_1f1b", "zb_v")
OTHER_LENGTHS = (*(Iteration(length=length) for length in (12, 7, 12)), EVALUATION)
# Each schedule is traced anew, which takes most of the time of these tests: they run the first of theirs, and
# the others in the sweep.


def compare(build: Any, *kinds: str, whole: bool, **settings: Any) -> None:
    """In the sweep with all the schedules, else with the first."""
    recipe = Recipe(build=build, batch=features, loss=classify)
    cases = {
        kind: Case(
            config={"microbatches": 4, "profile": "estimated", "pipeline": kind, **settings},
            iterations=OTHER_LENGTHS,
        )
        for kind in (kinds if whole else kinds[:1])
    }
    assert run_ranks(differences_by_case, 2, recipe, cases, timeout_s=60) == [{}] * 2


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.sweep)], ids=["some", "all"])
def check(request):
    return partial(compare, whole=request.param)


class Table(nn.Module):
    """Computes a table when it is asked for a longer one, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None
        self.register_buffer("scale", torch.tensor(0.1))

    def compute(self, length: int) -> Tensor:
        """Not the beginning of a longer one."""
        return (torch.arange(length)[:, None] - length / 2) * self.scale

    def forward(self, length: int) -> Tensor:
        if self.table is None or len(self.table) < length:
            self.table = self.compute(length)
        return self.table[:length]


class TableInABuffer(Table):
    """Of which the constructor makes a short one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", self.compute(3), persistent=False)

    def forward(self, length: int) -> Tensor:
        if len(self.kept) < length:
            self.kept = self.compute(length)
        return self.kept[:length]


class TableInALateBuffer(Table):
    """Which belongs to the state of the module when it is there."""

    def forward(self, length: int) -> Tensor:
        if not hasattr(self, "kept") or len(self.kept) < length:
            self.register_buffer("kept", self.compute(length))
        return self.kept[:length]


@lru_cache(maxsize=1)
def cached_table(length: int) -> Tensor:
    return (torch.arange(length)[:, None] - length / 2) * 0.1


class TableBehindLruCache(Table):
    def forward(self, length: int) -> Tensor:
        return cached_table(length)


class AddsTable(Stack):
    """The product of the table is a free operation, the one behind it is not."""

    def __init__(self, kind: type[Table]) -> None:
        super().__init__()
        self.positions = kind()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block((x + self.positions(x.shape[1])) * 0.5)
        return self.head(x)


@pytest.mark.parametrize("kind", [TableInABuffer, TableBehindLruCache])
def test_a_table_is_computed_once_and_found_by_later_microbatches(check, kind):
    number = 1 + (kind is TableBehindLruCache)
    check(partial(AddsTable, kind), *KINDS[number:], *KINDS[:number])


class WarmsUp(Stack):
    """A flag that only changes a number."""

    def __init__(self) -> None:
        super().__init__()
        self.first = True

    def forward(self, x: Tensor) -> Tensor:
        scale = 0.1 if self.first else 1.0
        self.first = False
        for block in self.blocks:
            x = block(x * scale)
        return self.head(x)


class ScalesOnce(WarmsUp):
    """A flag behind which something is computed with what comes from a unit."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        if self.first:
            x = x * 0.1
        self.first = False
        for block in self.blocks[1:]:
            x = block(x)
        return self.head(x)


class ReturnsEarlier(WarmsUp):
    """Later microbatches leave out the last thing."""

    def forward(self, x: Tensor) -> Tensor:
        first, self.first = self.first, False
        for block in self.blocks:
            x = block(x)
        x = self.head(x)
        return x * 0.1 if first else x


def test_later_microbatches_may_leave_out_what_is_behind_the_last_layer(check):
    """Every rank runs that as it is, once it differs from the trace."""
    check(ReturnsEarlier, "1f1b")


@pytest.mark.parametrize(
    "build",
    [
        ScalesOnce,
    ],
)
def test_other_operations_that_have_a_place_are_refused(check, build):
    with pytest.raises(RanksFailedError, match="takes another path than when it was traced"):
        check(build, "1f1b")


def test_a_script_may_throw_a_table_away():
    def run():
        import shardwright.torch as sw

        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        module = AddsTable(Table)
        plain = AddsTable(Table)
        plain.load_state_dict(module.state_dict())
        sw.init({"microbatches": 4, "profile": "estimated", "run_dir": "off", "pipeline": "interleaved_1f1b"})
        model = sw.DistributedModel(module)

        @sw.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        losses = []
        for scale in (0.1, 0.3, 0.3, 0.2):
            x = torch.randn(8, 12, plain.head.in_features)
            expected = plain(x).square().mean()
            losses.append((train(model, x).reduce_mean().item(), expected.item()))
            for table in (model.module.positions, plain.positions):
                table.table = None if scale != 0.3 else torch.full((12, 1), scale)
                table.scale.fill_(scale)
        return losses

    for losses in run_ranks(run, 2, timeout_s=60):
        for found, expected in losses:
            assert found == pytest.approx(expected, abs=1e-12)


def test_a_table_that_became_a_buffer_is_in_the_state_of_the_model():
    def run():
        import shardwright.torch as sw

        torch.manual_seed(0)
        sw.init({"microbatches": 4, "profile": "estimated", "run_dir": "off", "pipeline": "1f1b"})
        model = sw.DistributedModel(AddsTable(TableInALateBuffer))

        @sw.step
        def train(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        train(model, torch.randn(8, 12, model.module.head.in_features))
        return model.state_dict()["positions.kept"]

    for kept in run_ranks(run, 2, timeout_s=60):
        assert torch.equal(kept, Table().compute(12))

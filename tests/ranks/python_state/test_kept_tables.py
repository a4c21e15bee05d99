"""Tables that code between units computes once and keeps: later microbatches take another path."""

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from stacks import train as squares
from torch import Tensor, nn
from transparency import EVALUATION, Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import Stack

import shardwright.torch as sw
from shardwright.testing import RanksFailedError, run_ranks

OTHER_LENGTHS = (*(Iteration(length=length) for length in (12, 7, 12)), EVALUATION)


def check(build: Any, kind: str) -> None:
    recipe = Recipe(build=build, batch=features, loss=classify)
    config = {"microbatches": 4, "profile": "estimated", "pipeline": kind}
    assert run_ranks(differences, 2, recipe, Case(config=config, iterations=OTHER_LENGTHS)) == [[], []]


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
def test_a_table_is_computed_once_and_found_by_later_microbatches(kind):
    check(partial(AddsTable, kind), "interleaved_1f1b" if kind is TableInABuffer else "zb_v")


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


def test_later_microbatches_may_leave_out_what_is_behind_the_last_layer():
    """Every rank runs that as it is, once it differs from the trace."""
    check(ReturnsEarlier, "1f1b")


def test_other_operations_that_have_a_place_are_refused():
    with pytest.raises(RanksFailedError, match="takes another path than when it was traced"):
        check(ScalesOnce, "1f1b")


def test_a_script_may_throw_a_table_away():
    def run():
        torch.manual_seed(0)
        torch.set_default_dtype(torch.float64)
        module = AddsTable(Table)
        plain = AddsTable(Table)
        plain.load_state_dict(module.state_dict())
        sw.init({"microbatches": 4, "profile": "estimated", "run_dir": "off", "pipeline": "interleaved_1f1b"})
        model = sw.DistributedModel(module)
        train = sw.step(squares)
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
        torch.manual_seed(0)
        sw.init({"microbatches": 4, "profile": "estimated", "run_dir": "off", "pipeline": "1f1b"})
        model = sw.DistributedModel(AddsTable(TableInALateBuffer))
        train = sw.step(squares)
        train(model, torch.randn(8, 12, model.module.head.in_features))
        return model.state_dict()["positions.kept"]

    for kept in run_ranks(run, 2, timeout_s=60):
        assert torch.equal(kept, Table().compute(12))

"""Tables that code between units computes once and keeps: later microbatches take another path."""

from functools import lru_cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transparency import EVALUATION, Case, Iteration, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import WIDTH, Block, Stack

from choices import in_every_run, in_sweep
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


class TableOfOneLength(Table):
    """And when it is asked for a shorter one."""

    def forward(self, length: int) -> Tensor:
        if self.table is None or len(self.table) != length:
            self.table = self.compute(length)
        return self.table


class TableFilledInPlace(Table):
    """Zeros first; a part is written by later microbatches."""

    def forward(self, length: int) -> Tensor:
        if self.table is None or len(self.table) != length:
            self.table = torch.zeros(length, 1, dtype=torch.float64)
        elif not self.table.any():
            self.table.add_(self.compute(length))
        return self.table


class TableInABuffer(Table):
    """Of which the constructor makes a short one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", self.compute(3), persistent=False)

    def forward(self, length: int) -> Tensor:
        if len(self.kept) < length:
            self.kept = self.compute(length)
        return self.kept[:length]


class TableCopiedIntoABuffer(Table):
    """As rotary tables for long sequences are, every time, from what is kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("short", self.compute(20), persistent=False)
        self.register_buffer("kept", self.compute(20), persistent=False)
        self.long: Tensor | None = None

    def forward(self, length: int) -> Tensor:
        if length < 10:
            self.kept.copy_(self.short)
        else:
            if self.long is None:
                self.long = 2 * self.compute(20)
            self.kept.copy_(self.long)
        return self.kept[:length] * 1.5


class TableInALateBuffer(Table):
    """Which belongs to the state of the module when it is there."""

    def forward(self, length: int) -> Tensor:
        if not hasattr(self, "kept") or len(self.kept) < length:
            self.register_buffer("kept", self.compute(length))
        return self.kept[:length]


class TablesByLength(Table):
    def __init__(self) -> None:
        super().__init__()
        self.tables: dict[int, Tensor] = {}

    def forward(self, length: int) -> Tensor:
        if length not in self.tables:
            self.tables[length] = self.compute(length)
        return self.tables[length]


class _Helper:
    def __init__(self) -> None:
        self.tables: list[Tensor] = []


class TableInAnObject(Table):
    """That is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.helper = _Helper()

    def forward(self, length: int) -> Tensor:
        if not self.helper.tables or len(self.helper.tables[-1]) != length:
            self.helper.tables.append(self.compute(length))
        return self.helper.tables[-1]


@lru_cache(maxsize=1)
def cached_table(length: int) -> Tensor:
    return (torch.arange(length)[:, None] - length / 2) * 0.1


class TableBehindLruCache(Table):
    def forward(self, length: int) -> Tensor:
        return cached_table(length)


class TableBehindAFlag(Table):
    def __init__(self) -> None:
        super().__init__()
        self.lengths: set[int] = set()

    def forward(self, length: int) -> Tensor:
        if length not in self.lengths:
            self.table = self.compute(length)
            self.lengths = {length}
        return self.table


class AddsTable(Stack):
    """The product of the table is a free operation, the one behind it is not."""

    def __init__(self, kind: type[Table]) -> None:
        super().__init__()
        self.positions = kind()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block((x + self.positions(x.shape[1])) * 0.5)
        return self.head(x)


class AddsTableOnce(AddsTable):
    def forward(self, x: Tensor) -> Tensor:
        return Stack.forward(self, x + self.positions(x.shape[1]))


class CountsToo(AddsTable):
    """The number of microbatches goes into what is computed."""

    def __init__(self) -> None:
        super().__init__(Table)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x / self.calls)


TABLES = (
    Table,
    TableOfOneLength,
    TableInABuffer,
    TableInALateBuffer,
    TablesByLength,
    TableInAnObject,
    TableBehindLruCache,
    TableBehindAFlag,
)


@pytest.mark.parametrize("kind", in_every_run(TABLES, [TableInABuffer, TableBehindLruCache]))
def test_a_table_is_computed_once_and_found_by_later_microbatches(check, kind):
    number = TABLES.index(kind) % 3
    check(partial(AddsTable, kind), *KINDS[number:], *KINDS[:number])


@pytest.mark.thorough
def test_a_table_is_copied_into_a_buffer_by_every_microbatch(check):
    """The buffer had a home, for which the path of the first microbatch was every other's."""
    check(partial(AddsTableOnce, TableCopiedIntoABuffer), "interleaved_1f1b", "1f1b", "zb_v")


@pytest.mark.thorough
def test_a_table_may_be_filled_later_where_a_rank_has_one_stage(check):
    check(partial(AddsTable, TableFilledInPlace), "1f1b")


class ScalesByTheFirst(Stack):
    """What is kept comes from the first batch, which every rank has."""

    def __init__(self) -> None:
        super().__init__()
        self.scale: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.scale is None:
            self.scale = 1 / x.std()
        for block in self.blocks:
            x = block(x * self.scale)
        return self.head(x)


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


class CountingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return super().forward(x / self.calls.clone())


class BlocksCountInPlace(Stack):
    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(6))


class CountsInPlace(Stack):
    """In tensors that are no buffers: of the module, in a list, of an object."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = torch.zeros(())
        self.more = [torch.zeros(())]
        self.helper = _Helper()
        self.helper.tables.append(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        for counter in (self.calls, self.more[0], self.helper.tables[0]):
            counter.add_(1)
            x = x / counter
        return super().forward(x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "build",
    [BlocksCountInPlace, in_sweep(CountsInPlace), in_sweep(CountsToo), ScalesByTheFirst, WarmsUp],
)
def test_what_the_first_microbatch_alone_computes_on_every_rank(check, build):
    check(build, "interleaved_1f1b", "1f1b")


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


class DrawsOnce(WarmsUp):
    """Random features: later microbatches draw less."""

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            self.noise = torch.rand(1, dtype=x.dtype)
        self.first = False
        for block in self.blocks:
            x = block(x * self.noise)
        return self.head(x)


class CountsInPlaceForLater(CountsInPlace):
    """Later stages read what other microbatches change meanwhile."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (self.calls + self.more[0] + self.helper.tables[0])


@pytest.mark.thorough
def test_a_tensor_that_microbatches_change_in_turn_needs_one_stage_a_rank(check):
    check(CountsInPlaceForLater, "1f1b")
    with pytest.raises(RanksFailedError, match=r"the attribute (calls|more) of .* stages change in between"):
        check(CountsInPlaceForLater, "interleaved_1f1b")


def test_later_microbatches_may_leave_out_what_is_behind_the_last_layer(check):
    """Every rank runs that as it is, once it differs from the trace."""
    check(ReturnsEarlier, "1f1b")


@pytest.mark.parametrize("build", [ScalesOnce, in_sweep(DrawsOnce)])
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


class SecondPhase(Stack):
    """What later microbatches keep is read on later stages."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.mean: Tensor | None = None
        self._in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = x.std()
        elif self._in_place:
            self.mean.mul_(0.9).add_(0.1 * x.std())
        else:
            self.mean = 0.9 * self.mean + 0.1 * x.std()
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.mean)


class ShortensLate(Stack):
    """Later microbatches change on a later stage what is read on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(x.std())
        x = x * torch.stack(self.history).mean()
        for block in self.blocks:
            x = block(x)
        if len(self.history) > 2:
            self.history.pop(0)
        return self.head(x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "message"),
    [
        (partial(SecondPhase, False), "where each rank has one stage"),
        in_sweep(partial(SecondPhase, True), "where each rank has one stage"),
        (ShortensLate, "changes the attribute history .* microbatch . has read it"),
    ],
    ids=["new", "in place", "a list"],
)
def test_what_later_microbatches_begin_to_keep_needs_one_stage_a_rank(check, build, message):
    check(build, "1f1b")
    with pytest.raises(RanksFailedError, match=message):
        check(build, "interleaved_1f1b")


class ReadsWhenRecomputed(Stack):
    """The backward runs code that reads what the forward of its microbatch has written."""

    def part(self, x: Tensor, block: nn.Module) -> Tensor:
        return block(x * self.scale)

    def forward(self, x: Tensor) -> Tensor:
        self.scale = x.std()
        x = self.blocks[0](x)
        for block in self.blocks[1:]:
            x = checkpoint(self.part, x, block, use_reentrant=False)
        return self.head(x)


def test_a_recomputation_finds_the_attributes_of_its_microbatch(check):
    check(ReadsWhenRecomputed, "zb_v", "1f1b", "interleaved_1f1b")


class KeepsMask(Block):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        self.last_mask = mask
        return super().forward(x) * mask


class ReadsKeptMask(Stack):
    """Units keep an argument that every rank has; the model uses it as its own, and from there."""

    def __init__(self) -> None:
        super().__init__(0)
        self.blocks = nn.ModuleList(KeepsMask() for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        mask = (x.mean(-1, keepdim=True) > -0.1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(x * mask) / mask.sum() * self.blocks[1].last_mask.sum()


class ParameterAsBuffer(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", nn.Parameter(torch.ones(WIDTH), requires_grad=False))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.offset * 0.5)


@pytest.mark.parametrize("build", [ReadsKeptMask, ParameterAsBuffer])
def test_free_tensors_in_unusual_places(check, build):
    check(build, *KINDS[::-1])

"""Modules that hand on tensors and counters by other ways than arguments and results."""

import functools
import gc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from stacks import start
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH

from choices import combinations_of, in_every_run
from shardwright.testing import RanksFailedError, run_ranks
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.tracing.trace import trace_step

CONFIG = {"microbatches": 4, "profile": "estimated"}
SHARED = "has left in an object, a list or a variable"


class Notes:
    """An object of the user's own, which is no container."""

    def __init__(self) -> None:
        self.first: Tensor | None = None
        self.depth = 0
        self.width = 0


class Whole(nn.Module):
    """A block that is a unit as a whole: it has no modules inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: Tensor, notes: Any = None) -> Tensor:
        return x + (x @ self.weight).tanh()


class Noting(Whole):
    """Takes part in a value residual: what the first block computes is added in all of them."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        y = super().forward(x)
        if notes.first is None:
            notes.first = y
        return y + 0.5 * notes.first


class Choosing(Noting):
    """Cannot be traced without data."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        if x.detach().abs().amax() < 0:
            return x
        return super().forward(x, notes)


class Counting(Whole):
    """Scales by how deep it is, which all blocks count together."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        notes.depth += 1
        return super().forward(x) / notes.depth**0.5


class SettingFirst(Whole):
    """Reads what it has written itself."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        notes.width = x.shape[-1]
        return super().forward(x) / notes.width


class OneEach(Whole):
    """Looks at its own entry alone, like the blocks of a model with a cache of keys and values."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        own = vars(notes).setdefault("entries", {}).setdefault(id(self), Notes())
        own.first = super().forward(x)
        return own.first + 1.0


class Handed(nn.Module):
    """Blocks that get a new object each time."""

    def __init__(self, *blocks: type[Whole]):
        super().__init__()
        self.blocks = nn.ModuleList(block() for block in blocks)
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        for block in self.blocks:
            x = block(x, notes)
        return self.head(x)


class Held(Handed):
    """Every block holds the object."""

    def __init__(self, *blocks: type[Whole]):
        super().__init__(*blocks)
        self.notes = Notes()
        for block in self.blocks:
            block.notes = self.notes

    def forward(self, x: Tensor) -> Tensor:
        self.notes.__init__()  # type: ignore[misc]
        for block in self.blocks:
            x = block(x, block.notes)
        return self.head(x)


class NotesModule(Notes, nn.Module):
    """The same as a module, which all blocks have."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        Notes.__init__(self)
        self.depths = {"of all": [0]}


class CountingInAList(Whole):
    def forward(self, x: Tensor, notes: Any) -> Tensor:
        notes.depths["of all"][0] += 1
        return super().forward(x) / notes.depths["of all"][0]


class HeldInAModule(Held):
    notes: NotesModule  # type: ignore[assignment]

    def __init__(self, *blocks: type[Whole]):
        super().__init__(*blocks)
        self.notes = NotesModule()
        for block in self.blocks:
            block.notes = None if type(block) is Whole else self.notes  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        self.notes.depth, self.notes.depths["of all"][0] = 0, 0
        for block in self.blocks:
            x = block(x, block.notes)
        return self.head(x)


class ReadBetween(Handed):
    """Code between the blocks looks at what they count."""

    def forward(self, x: Tensor) -> Tensor:
        notes = Notes()
        for block in self.blocks:
            x = block(x, notes) / (1 + notes.depth)
        return self.head(x)


APART_IN_TWO = {"pipeline_parallel_degree": 2}
FOUND: dict[str, Tensor] = {}


class Leaving(Whole):
    """Puts what it makes where everybody finds it."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        y = super().forward(x)
        FOUND["mean"] = y.mean(0)
        return y


class Finding(Whole):
    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        return super().forward(x) + FOUND["mean"].tanh()


def recipe_of(build: Callable[[], nn.Module]) -> Recipe:
    return Recipe(build=build, batch=features, loss=classify)


TOGETHER = {
    "a tensor in an object": lambda: Handed(Noting, Noting, Whole, Whole, Whole),
    "from a module that reads values": lambda: Handed(Whole, Whole, Whole, Noting, Choosing),
    "a count in an object": lambda: Handed(Whole, Whole, Counting, Counting, Whole, Whole),
    "a count in an object that blocks hold": lambda: Held(Counting, Counting, Whole, Whole, Whole),
    "a global": lambda: Handed(Leaving, Whole, Finding, Whole, Whole, Whole),
}
FREE = {
    "reads what it wrote": lambda: Handed(*[SettingFirst] * 6),
    "an entry each": lambda: Handed(*[OneEach] * 6),
}


@pytest.mark.parametrize(
    ("name", "pipeline"),
    combinations_of(
        [*TOGETHER, *FREE],
        ["auto", "zb_v"],
        kept=[
            *(("a tensor in an object", "auto"), ("from a module that reads values", "zb_v")),
            *(("a count in an object that blocks hold", "zb_v"), ("an entry each", "auto")),
        ],
    ),
)
def test_modules_that_share_an_object_share_a_stage(name, pipeline):
    config = {**CONFIG, "pipeline": pipeline, "pipeline_parallel_degree": 2}
    case = Case(config=config, iterations=[Iteration()] * 2)
    assert run_ranks(differences, 2, recipe_of({**TOGETHER, **FREE}[name]), case) == [[], []]


def differences_of_held_states() -> list[str]:
    found = []
    for block in (Counting, CountingInAList):
        for pipeline in ("auto", "zb_v"):
            recipe = recipe_of(lambda block=block: HeldInAModule(Whole, block, block, Whole, Whole, Whole))
            config = {**CONFIG, "pipeline": pipeline, "pipeline_parallel_degree": 2}
            found += differences(recipe, Case(config=config, iterations=[Iteration()] * 2))
    return found


def test_modules_that_share_a_module_or_a_list_share_a_stage():
    """Each stage counted for itself."""
    assert run_ranks(differences_of_held_states, 2) == [[], []]


APART = {
    "a tensor in an object": lambda: Handed(*[Noting] * 5),
    "from a module that reads values": lambda: Handed(Noting, Whole, Whole, Whole, Choosing),
    "a count in an object": lambda: Handed(*[Counting] * 5),
    "a count in an object that blocks hold": lambda: Held(*[Counting] * 5),
    "a global": lambda: Handed(Leaving, Whole, Whole, Whole, Finding),
}


def halves(model: nn.Module) -> nn.Module:
    """Places the last block and the head on the second stage."""
    import shardwright.torch as sw

    sw.set_partition(model.blocks[-1], 1)
    sw.set_partition(model.head, 1)
    return model


@pytest.mark.parametrize(
    "name",
    in_every_run(
        APART,
        ["a tensor in an object", "a global"],
    ),
)
def test_where_they_cannot_the_error_says_what_they_share(name):
    config = {**CONFIG, "pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}
    recipe = recipe_of(lambda: halves(APART[name]()))
    with pytest.raises(RanksFailedError, match=SHARED) as caught:
        run_ranks(differences, 2, recipe, Case(config=config, iterations=[Iteration()]))
    assert "test_hidden_inputs.py" in str(caught.value)


def test_code_between_units_cannot_read_what_they_changed():
    case = Case(config={**CONFIG, "pipeline_parallel_degree": 2}, iterations=[Iteration()])
    with pytest.raises(RanksFailedError, match="the attribute depth of an object is read here"):
        run_ranks(differences, 2, recipe_of(lambda: ReadBetween(*[Counting] * 5)), case)


# ---- what follows from shapes alone each rank makes for itself


TABLES: dict[int, Tensor] = {}


def angles_in_a_global(length: int) -> Tensor:
    if length not in TABLES:
        TABLES[length] = torch.arange(length, dtype=torch.float64).cos()
    return TABLES[length]


@functools.lru_cache
def angles_behind_a_cache(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float64).cos() * 0.5


class Angles(Whole):
    """Adds a table that the first block to come by makes."""

    tables: ClassVar[dict[str, Tensor]] = {}

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        length = x.shape[1]
        table = angles_in_a_global(length) + angles_behind_a_cache(length)
        if "own" not in Angles.tables:
            Angles.tables["own"] = torch.linspace(0.0, 1.0, length, dtype=torch.float64)
        return super().forward(x) + (table + Angles.tables["own"])[:, None]


def test_tables_that_modules_make_and_keep_bind_nothing():
    def job() -> float:
        halves_by_hand = {"auto_partition": False, "default_partition": 0}
        sw, plain, model = start(lambda: halves(Handed(*[Angles] * 5)), {**APART_IN_TWO, **halves_by_hand})

        @sw.step
        def train(model: nn.Module, x: Tensor) -> Tensor:
            loss = model(x).square().mean()
            model.backward(loss)
            return loss

        x = torch.randn(8, 5, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
        found = train(model, x).reduce_mean()  # before the plain model, which would make the tables
        return abs(found.item() - plain(x).square().mean().item())

    assert max(run_ranks(job, 2)) < 1e-12


# ---- objects whose classes cannot be watched, modules that run on random data


class Sealed(type):
    def __setattr__(cls, key: str, value: Any) -> None:
        raise AttributeError("sealed")


class SealedNotes(Notes, metaclass=Sealed):
    pass


class HandedOther(Handed):
    make: Callable[[], Any]

    def forward(self, x: Tensor) -> Tensor:
        notes = self.make()
        for block in self.blocks:
            x = block(x, notes)
        return self.head(x)


class HandedSealed(HandedOther):
    make = SealedNotes


class HandedNamespace(HandedOther):
    make = functools.partial(SimpleNamespace, first=None, depth=0)


class CountingChoosing(Counting):
    """Cannot be traced without data."""

    def forward(self, x: Tensor, notes: Notes) -> Tensor:
        if x.detach().abs().amax() < 0:
            return x
        return super().forward(x, notes)


UNWATCHED = {
    "a sealed class": lambda: HandedSealed(*[Counting] * 5),
    "a namespace": lambda: HandedNamespace(*[Counting] * 5),
    "written by a module that reads values": lambda: Handed(CountingChoosing, *[Counting] * 4),
    "all read values": lambda: Handed(*[CountingChoosing] * 5),
}


@pytest.mark.parametrize("name", in_every_run(UNWATCHED, ["a sealed class", "all read values"]))
def test_objects_of_any_class_bind_those_that_share_them(name):
    config = {**CONFIG, "pipeline_parallel_degree": 2, "auto_partition": False, "default_partition": 0}
    recipe = recipe_of(lambda: halves(UNWATCHED[name]()))
    with pytest.raises(RanksFailedError, match=SHARED):
        run_ranks(differences, 2, recipe, Case(config=config, iterations=[Iteration()]))


def test_traces_leave_no_tensors_behind():
    """The history of a trace held its batch for as long as the process lived."""

    def job() -> list[int]:
        model = Handed(*[OneEach] * 3).double()
        unit_map = UnitMap.of(model, ["blocks.0", "blocks.1", "blocks.2", "head"])
        for unit in unit_map.modules.values():
            intercept_calls(unit)
        counts = []
        for length in range(3, 9):
            batch = (torch.zeros(2, length, WIDTH, dtype=torch.float64),)
            trace_step(unit_map, model, (batch, {}))
            del batch
            gc.collect()
            counts.append(sum(type(item) is Tensor for item in gc.get_objects()))  # with data
        return counts

    (counts,) = run_ranks(job, 1)
    assert len(set(counts[1:])) == 1, counts

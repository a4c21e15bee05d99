"""State that units share out of reach, or change in some microbatches alone: exact, or one error."""

import copy
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwright.torch as sw
from shardwright.testing import run_ranks

WIDTH = 8
MICROBATCHES = 4


class Block(nn.Module):
    """A unit as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.shared: Any = None

    def forward(self, x: Tensor, *containers: list[Tensor]) -> Tensor:
        return x + (x @ self.weight).tanh()


class Counting(Block):
    """Divides by a number that all such blocks count up."""

    def forward(self, x: Tensor, *containers: list[Tensor]) -> Tensor:
        self.shared["n"] += 1
        return super().forward(x) / self.shared["n"]


class CountingBehindData(Counting):
    """Has a long table before the number."""

    def __init__(self) -> None:
        self.table: Any = tuple(range(20_000))
        super().__init__()


class Remembering(Block):
    """Reads values, so that it is traced on data, and keeps a history."""

    def __init__(self) -> None:
        super().__init__()
        self.history: deque[float] = deque(maxlen=10)
        self.seen: set[float] = set()

    def forward(self, x: Tensor, *containers: list[Tensor]) -> Tensor:
        if x.detach().mean() > 1e9:
            return x
        self.history.append(1.0)
        self.seen.add(2.0)
        return super().forward(x)


class AppendsSometimes(Block):
    """Appends to the list that it is given in all microbatches but the first."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor, *containers: list[Tensor]) -> Tensor:
        y = super().forward(x)
        self.calls += not sw.is_tracing()
        if self.calls > 1:
            containers[0].append(y.square().mean())
        return y


class Reading(Block):
    """Adds what is in a list."""

    def forward(self, x: Tensor, *containers: list[Tensor]) -> Tensor:
        return super().forward(x) + self.shared[0]


class Model(nn.Module):
    """Eight blocks; those in the middle share something."""

    def __init__(self, kind: type[Block], shared: Any = None, *, writes_at: int | None = None):
        super().__init__()
        middle = range(4, 5) if writes_at is not None else range(2, 6)
        self.blocks = nn.ModuleList(kind() if i in middle else Block() for i in range(8))
        for i in middle:
            self.blocks[i].shared = shared
        self.shared, self.writes_at, self.gives_lists = shared, writes_at, kind is AppendsSometimes

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.shared, dict):
            self.shared["n"] = 0
        containers: list[list[Tensor]] = [[]] if self.gives_lists else []
        for i, block in enumerate(self.blocks):
            x = block(x, *containers)
            if i == self.writes_at:
                self.shared[0] = x.detach() / 2
        return x.square().mean() + (torch.stack(containers[0]).sum() if containers and containers[0] else 0)


def compared(build: Callable[[], nn.Module]) -> tuple[float, float] | str:
    """The loss of a step over two stages and that of a plain loop; an error's type and text."""
    sw.init(
        {
            "pipeline_parallel_degree": 2,
            "microbatches": MICROBATCHES,
            "profile": "estimated",
            "run_dir": "off",
            "timeout_s": 30.0,
        }
    )
    torch.manual_seed(0)
    plain = build().double()
    model = sw.DistributedModel(copy.deepcopy(plain))

    @sw.step
    def train(model: Any, x: Tensor) -> Tensor:
        loss: Tensor = model(x)
        model.backward(loss)
        return loss

    x = torch.randn(8, WIDTH, dtype=torch.float64)
    try:
        found = train(model, x).reduce_mean().item()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return found, sum(plain(part).item() for part in x.chunk(MICROBATCHES)) / MICROBATCHES


@pytest.mark.parametrize("kind", [Counting, CountingBehindData, Remembering])
def test_state_is_found_however_far_it_is(kind: type[Block]) -> None:
    """Blocks with more than some hundred modules, or a long tuple, went on with numbers of their own."""
    shared = {"n": 0} if issubclass(kind, Counting) else None
    for found in run_ranks(lambda: compared(lambda: Model(kind, shared)), 2):
        assert not isinstance(found, str), found
        assert found[0] == pytest.approx(found[1], rel=1e-12)


def test_an_entry_that_a_unit_reads_before_it_is_written_is_refused() -> None:
    """All microbatches read the first value: that a unit reads an entry of a list was not seen."""

    def build() -> nn.Module:
        return Model(Reading, [torch.zeros(2, WIDTH, dtype=torch.float64)], writes_at=6)

    for found in run_ranks(lambda: compared(build), 2):
        assert isinstance(found, str), found
        assert "before the microbatch writes it" in found

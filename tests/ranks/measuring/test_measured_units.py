"""Units are timed on random data, which not every unit takes."""

import logging
from collections import Counter

import torch
from torch import Tensor, nn
from transparency import Case, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import WIDTH, Stack

import shardwright.torch as sw
from shardwright.testing import run_ranks


class Whitens(nn.Module):
    """Takes a positive definite matrix for each sample, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, matrix: Tensor) -> Tensor:
        return torch.linalg.cholesky(matrix) @ self.weight


class FactorsAMatrix(Stack):
    """Random matrices would be refused."""

    def __init__(self) -> None:
        super().__init__()
        self.whitens = Whitens()

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        matrix = x.transpose(1, 2) @ x + torch.eye(WIDTH, dtype=x.dtype)
        return self.head(x + self.whitens(matrix).mean(1, keepdim=True))


class Said(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def train(recipe: Recipe, cases: dict[str, Case]) -> tuple[dict[str, str], list[str]]:
    said = Said()
    logging.getLogger("shardwright.run.profiler").addHandler(said)
    return differences_by_case(recipe, cases), said.lines


def test_a_unit_that_fails_on_random_data_is_estimated():
    recipe = Recipe(build=FactorsAMatrix, batch=features, loss=classify)
    cases = {"measured": Case(config={"microbatches": 4, "profile": "measured", "pipeline": "1f1b"})}
    (first, said), (second, nothing) = run_ranks(train, 2, recipe, cases, timeout_s=60)
    assert first == second == {}
    assert len(said) == 1
    assert said[0].startswith("whitens (Whitens) cannot be run on random data")
    assert "its cost is estimated" in said[0]
    assert not nothing  # all ranks fail alike


def calls_of_hooks(num_steps: int) -> dict[str, int]:
    """How often each hook of a model ran on this rank."""
    sw.init({"microbatches": 3, "pipeline": "1f1b", "run_dir": "off"})
    count: Counter[str] = Counter()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)))

    def note(name: str) -> None:
        if not sw.is_tracing():
            count.update([name])

    model[0].register_forward_pre_hook(lambda module, given: note("before"))
    model[0][0].register_forward_hook(lambda module, given, made: note("inside"))
    model[0].register_full_backward_hook(lambda module, given, made: count.update(["backward"]))
    model[0][0].weight.register_hook(lambda gradient: count.update(["parameter"]))
    wrapped = sw.DistributedModel(model)

    @sw.step
    def train(model: nn.Module, x: Tensor) -> None:
        model.backward(model(x).square().mean())

    generators = torch.get_rng_state()
    for _ in range(num_steps):
        train(wrapped, torch.ones(6, 64, requires_grad=True))
    assert torch.equal(torch.get_rng_state(), generators)
    return dict(count)


def test_hooks_run_as_often_as_in_a_plain_loop():
    """Those inside of units ran as often as the units were timed, too: some 250 times."""
    first, second = run_ranks(calls_of_hooks, 2, 2, timeout_s=60)
    assert first == {"before": 6, "inside": 6, "backward": 6, "parameter": 6}
    assert second == {"before": 6}  # hooks of a whole unit run on every rank

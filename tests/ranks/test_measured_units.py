"""Units are timed on random data, which not every unit takes."""

import logging

import torch
from torch import Tensor, nn
from transparency import Case, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import WIDTH, Stack

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
    logging.getLogger("shardwright.torch.profiler").addHandler(said)
    return differences_by_case(recipe, cases), said.lines


def test_a_unit_that_fails_on_random_data_is_estimated():
    recipe = Recipe(build=FactorsAMatrix, batch=features, loss=classify)
    cases = {"measured": Case(config={"microbatches": 4, "profile": "measured", "pipeline": "1f1b"})}
    for differences, said in run_ranks(train, 2, recipe, cases, timeout_s=60):
        assert differences == {}
        assert len(said) == 1
        assert "Whitens" in said[0]
        assert "its cost is estimated" in said[0]

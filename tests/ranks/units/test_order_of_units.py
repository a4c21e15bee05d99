"""A step may call the units in another order than the one for which the plan was made."""

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Iteration, Recipe, differences_by_case
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH, Block

import shardwright.torch as sw
from choices import in_sweep
from shardwright.testing import run_ranks


class EitherWay(nn.Module):
    """Odd lengths go through the blocks from the last to the first."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))
        self.scale = nn.Parameter(torch.rand(WIDTH))
        self.head = nn.Linear(WIDTH, CLASSES)
        if tied:
            self.blocks[7].up.weight = self.blocks[0].up.weight
            self.blocks[6].down.weight = self.blocks[2].down.weight

    def forward(self, x: Tensor) -> Tensor:
        backwards = x.shape[1] % 2
        for number in reversed(range(8)) if backwards else range(8):
            x = self.blocks[number](x)
            if number == 6:
                x = x * self.scale
        return self.head(x)


def with_a_bucket_for_each_parameter(recipe, cases):
    sw.DistributedModel.__init__.__kwdefaults__["bucket_cap_mb"] = 1e-6
    return differences_by_case(recipe, cases)


@pytest.mark.parametrize(
    ("tied", "kinds"),
    [
        in_sweep(False, ("1f1b",)),
        (True, ("zb_v",)),
        in_sweep(False, ("interleaved_1f1b", "zb_v")),
        in_sweep(True, ("1f1b", "interleaved_1f1b")),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, tuple) else str(value),
)
def test_replicas_and_ties_in_another_order(tied, kinds):
    recipe = Recipe(build=lambda: EitherWay(tied=tied), batch=features, loss=classify)
    iterations = (Iteration(), Iteration(length=13), Iteration())
    settings = {"microbatches": 4, "profile": "estimated", "pipeline_parallel_degree": 2}
    cases = {kind: Case(config={**settings, "pipeline": kind}, iterations=iterations) for kind in kinds}
    assert run_ranks(with_a_bucket_for_each_parameter, 4, recipe, cases, timeout_s=60) == [{}] * 4

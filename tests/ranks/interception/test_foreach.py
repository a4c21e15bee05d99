"""Functions that change several tensors at once (`torch._foreach_*_`), between units."""

import pytest
import torch
from torch import Tensor, nn
from transparency import Case, Recipe, differences
from zoo import classify, features
from zoo_modules import CLASSES, WIDTH, Stack

from choices import some_combinations
from shardwright.testing import run_ranks


class ChangesManyAtOnce(Stack):
    """What several stages made is changed together; one tensor is changed twice, through a view."""

    def forward(self, x: Tensor) -> Tensor:
        made = []
        for block in self.blocks:
            x = block(x) * 1.0
            made.append(x.clone())
        first = made[0][:, 1:]
        torch._foreach_mul_(made, 0.5)
        torch._foreach_add_(made[:2], [made[-1], made[-2]], alpha=0.1)
        torch._foreach_tanh_([first])
        with torch.no_grad():
            torch._foreach_copy_(made[-2:], [made[0], made[1]])
        return self.head(sum(made) + torch._foreach_norm(made)[0])


class AveragesItsWeights(Stack):
    """Weights without gradients follow others, all at once, in the step function."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.Linear(WIDTH, CLASSES).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        if self.training:
            with torch.no_grad():
                torch._foreach_lerp_(list(self.average.parameters()), list(self.head.parameters()), 0.1)
        return self.head(x) - self.average(x)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("build", "kind"),
    some_combinations([ChangesManyAtOnce, AveragesItsWeights], ["interleaved_1f1b", "1f1b"]),
)
def test_many_tensors_are_changed_at_once(build, kind):
    recipe = Recipe(build=build, batch=features, loss=classify)
    case = Case(config={"microbatches": 4, "profile": "estimated", "pipeline": kind})
    assert run_ranks(differences, 2, recipe, case, timeout_s=60) == [[]] * 2

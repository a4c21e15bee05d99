"""Hooks that only look on do not see that units are run for a search of placements."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.torch.counting.compiled_modules import HookEffects
from shardwright.torch.tensor_parallel.search import Unit, dry_run
from shardwright.torch.units.divided_costs import observers_aside


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def unit_of(module: nn.Module) -> Unit:
    return Unit(module, (torch.empty(2, 4, device="meta", requires_grad=True),))


def trace_of(hooks: HookEffects) -> Any:
    return SimpleNamespace(samples={"a": SimpleNamespace(hooks=hooks)})


def test_a_hook_that_collects_sees_nothing():
    """Bug: it found tensors without data, on the first rank alone, and counted more calls there."""
    module, seen = block(), []
    module[0].register_forward_hook(lambda module, args, output: seen.append(output))
    unit = unit_of(module)
    with observers_aside(trace_of(HookEffects()), [unit])():
        dry_run(unit, {}, rank=0, num_ranks=2)
    assert seen == []
    dry_run(unit, {}, rank=0, num_ranks=2)
    assert len(seen) == 1  # it is back


class Reads(nn.Module):
    """Its forward needs what a hook has left."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.found: list[Tensor] = []
        self.inner.register_forward_hook(lambda module, args, output: self.found.append(output))

    def forward(self, x: Tensor) -> Tensor:
        self.inner(x)
        return self.found.pop().tanh()


def test_a_hook_that_the_forward_needs_stays():
    unit = unit_of(Reads())
    with observers_aside(trace_of(HookEffects()), [unit])():
        dry_run(unit, {}, rank=0, num_ranks=2)


@pytest.mark.parametrize("inside", [True, False])
def test_whether_hooks_look_on(inside):
    module = block()
    if inside:
        module[2].register_forward_hook(lambda module, args, output: None)
    assert HookEffects().looks_on([module]) is inside

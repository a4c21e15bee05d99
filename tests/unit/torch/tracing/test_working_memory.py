"""What a unit needs for a moment, counted on tensors without data."""

import pytest
import torch
from torch import nn

from shardwright.torch._private import new_fake_mode
from shardwright.torch.counting.compiled_modules import HookEffects
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.working_memory import WorkingMemory, working_memory

ROWS, WIDTH = 64, 16
UNIT = ROWS * WIDTH * 4


def count(module, *, requires_grad=True):
    with new_fake_mode() as mode:
        x = torch.empty(ROWS, WIDTH, requires_grad=requires_grad)
        items, structure = flatten(((x,), {}))
        assert mode is not None
        return working_memory(module, items, structure, given=[False], hooks=HookEffects())


def test_gradients_and_temporaries_count():
    # Kept: x and exp(x). Backward: the gradient that comes in, and its product with exp(x).
    class Exp(nn.Module):
        def forward(self, x):
            return x.exp()

    found = count(Exp())
    assert found.work_bytes == pytest.approx(2 * UNIT, abs=64)
    assert found.weight_bytes == 0


def test_linear_layers_keep_inputs_and_gradients_for_their_weights():
    with new_fake_mode():
        module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    found = count(module)
    assert found.weight_bytes == pytest.approx((1 + 4 + 4 + 1) * UNIT, abs=64)
    # Where the gelu is differentiated, what the second layer had as its input is still there.
    assert found.split_work_bytes == pytest.approx((1 + 4 + 4) * UNIT, abs=64)
    assert found.work_bytes < found.split_work_bytes
    assert all("forward" not in vars(sub) for sub in module)
    assert all(parameter.grad is None for parameter in module.parameters())


def test_autocast_leaves_nothing_for_later():
    """Four bytes were left, so that an estimated plan split a backward that autocast keeps in one piece."""
    with new_fake_mode():
        module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert count(module).weight_bytes == 0


def test_nothing_is_known_without_gradients_or_where_it_fails():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError

    assert count(Broken()) == WorkingMemory()
    with torch.no_grad():
        assert count(nn.Linear(WIDTH, WIDTH)) == WorkingMemory()

"""What a unit needs for a moment, counted on tensors without data.

To count what a call needs for a moment, it is run several times more: nothing else may notice.
"""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardwright.torch._private.tensors import new_fake_mode
from shardwright.torch.counting.compiled_modules import HookEffects
from shardwright.torch.interception.glue import intercept_calls
from shardwright.torch.interception.library_code import patched_backward
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.trace import trace_step
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


def test_autocast_leaves_linear_layers_for_later_and_no_convolution():
    """Four bytes were left, so that an estimated plan split a backward that autocast keeps in one piece."""
    with new_fake_mode():
        linear = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        convolution = nn.Sequential(nn.Unflatten(0, (1, -1)), nn.Conv1d(ROWS, ROWS, 3, padding=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (count(linear).weight_bytes or 0) > 2 * WIDTH
        assert count(convolution).weight_bytes == 0


def test_nothing_is_known_without_gradients_or_where_it_fails():
    class Broken(nn.Module):
        def forward(self, x):
            raise ValueError

    assert count(Broken()) == WorkingMemory()
    with torch.no_grad():
        assert count(nn.Linear(WIDTH, WIDTH)) == WorkingMemory()


def shape_of_result(layer: nn.Module, step) -> tuple[int, ...]:
    model = nn.ModuleDict({"layer": layer})
    unit_map = UnitMap.of(model, ["layer"])
    intercept_calls(layer)
    trace = trace_step(unit_map, step, ((torch.ones(2, 4),), {}), memory={})
    assert trace.graph.nodes[0].work_bytes > 0
    return trace.graph.values[trace.graph.nodes[0].outputs[0]].spec.shape


class Cache:
    """What a decoder hands to its layers, as transformers has it."""

    def __init__(self) -> None:
        self.rows: Tensor | None = None


def test_a_cache_is_filled_once():
    class Fills(nn.Linear):
        def forward(self, x, cache):
            y = super().forward(x)
            cache.rows = y if cache.rows is None else torch.cat([cache.rows, y])
            return cache.rows

    layer = Fills(4, 4)
    assert shape_of_result(layer, lambda x: layer(x, Cache()).sum()) == (2, 4)


def test_a_recomputation_around_the_call_does_not_begin():
    """The first backward unpacked what the recomputation had saved, which ran it again, on real data."""
    layer = nn.Linear(4, 4)
    ran = []

    def region(x):
        ran.append(type(x))
        return layer(x * 2)

    assert shape_of_result(layer, lambda x: checkpoint(region, x, use_reentrant=False).sum()) == (2, 4)
    assert len(ran) == 1


def test_the_backward_of_an_operation_is_not_that_of_the_step_function():
    """Bug: in a pipeline no memory was counted for a loss, whose backward was taken for the model's."""
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"layer": layer})
    unit_map = UnitMap.of(model, ["layer"])
    intercept_calls(layer)

    def step(x):
        torch.autograd.backward(torch.log_softmax(layer(x), -1).sum())

    with patched_backward():
        trace = trace_step(unit_map, step, ((torch.ones(2, 4),), {}), memory={})
    work = {node.name: node.work_bytes for node in trace.graph.nodes}
    assert work["log_softmax"] >= 2 * 2 * 4 * 4  # the gradients of its result and of its argument
    assert trace.graph.loss is not None

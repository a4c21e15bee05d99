"""A planner's trace, which also counts memory, serves to run the model: it is the trace without that.

Counting registers hooks of its own. For a day, what was traced so counted as a step function that registers
hooks, and all hooks of the model were looked at whenever a microbatch was resumed: 10 ms in a step of 700.
"""

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transparency import Recipe
from zoo import TRANSFORMERS, ZOO

from shardwright.torch.batch.batch import Batch
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.tracing.working_memory import WorkingMemory
from shardwright.torch.units.model_traces import trace_parts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:transformers", "ignore::FutureWarning")

# Where tensors lie in memory is another number in every trace; samples hold fake tensors.
_NUMBERS_OF_THEIR_OWN = {"graph", "tensors", "steps", "samples", "path", "effects"}


def in_type(dtype: torch.dtype, item: Any) -> Any:
    return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item


def traced(recipe: Recipe, *, memory: dict[str, WorkingMemory] | None) -> Trace:
    torch.manual_seed(0)
    model = recipe.build().to(recipe.dtype).train()
    items, structure = flatten(recipe.batch(2, 12))
    part = structure.rebuild([in_type(recipe.dtype, item) for item in items])

    def train(batch: Any) -> None:
        recipe.loss(model, batch).backward()

    device = torch.device("cpu")
    traces = trace_parts(model, train, {1: Batch(((part,), {}))}, device=device, num_stages=4, memory=memory)
    return traces[1]


def what_counts(trace: Trace) -> dict[str, Any]:
    """What is in a program, or decides whether it holds."""
    found = {f.name: getattr(trace, f.name) for f in fields(trace) if f.name not in _NUMBERS_OF_THEIR_OWN}
    memories: dict[int, int] = {}
    memory = tuple(memories.setdefault(key, len(memories)) for key in trace.tensors.memory)
    found["tensors"] = replace(trace.tensors, memory=memory)
    found["effects"] = replace(trace.effects, attributes=(), left_in_units=())
    found["nodes"] = [
        replace(node, work_bytes=0, weight_bytes=None, split_work_bytes=0) for node in trace.graph.nodes
    ]
    found["follows"] = None if trace.path is None else len(trace.path.calls)
    found["left in units"] = [(type(module), name) for module, name in trace.effects.left_in_units]
    return found | {"digest": trace.digest}


SMALL = [name for name in ZOO if name not in TRANSFORMERS]


@pytest.mark.parametrize("name", SMALL[::9])
def test_counting_memory_changes_nothing_else(name):
    with_memory, without = (traced(ZOO[name], memory=memory) for memory in ({}, None))
    assert what_counts(with_memory) == what_counts(without)

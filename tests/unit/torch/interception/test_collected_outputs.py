"""What hooks of modules inside a unit collect belongs to its call."""

from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.interception.unit_attributes import COLLECTED, Collected
from shardwright.torch.python_state.filled_containers import filled_copy


class Collector:
    """As in transformers: an object that has the variable."""

    def __init__(self) -> None:
        self.variable: ContextVar[Any] = ContextVar("collector", default=None)

    def get(self) -> Any:
        return self.variable.get()


collector = Collector()


def append(module: nn.Module, args: Any, output: Tensor) -> None:
    lists = collector.get()
    if lists is not None:
        lists["logits"].append(output)


def unit(hook: Any) -> nn.Module:
    made = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    made[1].register_forward_hook(hook)
    return made


def test_what_hooks_inside_append_is_a_part_of_the_result():
    model, lists = unit(append), {"logits": [torch.zeros(1)], "which": {1}}
    assert Collected.of(model, is_trace=True) is None
    token = collector.variable.set(lists)
    try:
        collected = Collected.of(model, is_trace=True)
    finally:
        collector.variable.reset(token)
    assert collected is not None
    assert collected.given == {"collector": {"logits": [], "which": {1}}}
    # Where the variable is not set: a backward repeats a forward in a thread of its own.
    found = filled_copy(model, (torch.ones(1, 2),), {COLLECTED: collected.given})
    assert found.contents == {2: {0: found.result}}
    assert collector.get() is None
    collected.append()
    assert [len(each) for each in lists["logits"]] == [1, 1]

"""What hooks of modules inside a unit collect belongs to its call."""

from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import UsageError
from shardwright.torch.interception.unit_attributes import COLLECTED, Collected, call_copy, collects
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


def count(module: nn.Module, args: Any, output: Tensor) -> None:
    assert len(collector.get()["logits"]) >= 0


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


def test_hooks_of_the_unit_itself_and_other_hooks_collect_nothing():
    token = collector.variable.set({"logits": []})
    try:
        assert Collected.of(unit(append)[1], is_trace=True) is None
        assert Collected.of(unit(lambda module, args, output: None), is_trace=True) is None
    finally:
        collector.variable.reset(token)
    assert collects(append)
    assert not collects(lambda module, args, output: torch.ones(1))


def test_how_much_others_have_collected_is_not_known_inside():
    with pytest.raises(UsageError, match="asks how much other hooks have collected"):
        call_copy(unit(count), (torch.ones(1, 2),), {COLLECTED: {"collector": {"logits": []}}})

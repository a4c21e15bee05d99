"""Calls of a step function are looked up in a program: those that are free may differ from the trace."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.microbatches.program_cursor import ProgramCursor
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.program.instructions import Instruction, Place
from shardwright.torch.program.program import FreeOperations
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tracing.trace_data import RandomUse, Step

FREE, HERE, ELSEWHERE = Place.FREE, Place.HERE, Place.ELSEWHERE
A_DRAW: Any = object()


def cursor(*steps, backward_at=None, free=FreeOperations.ANY, parameters=()):
    instructions = [
        Instruction(step=step_of(func, f"user.py:{number}", draws=bool(draws)), place=place)
        for number, (func, place, *draws) in enumerate(steps)
    ]
    trace = SimpleNamespace(backward_at=backward_at, random=RandomUse())
    program: Any = SimpleNamespace(instructions=instructions, trace=trace, free_operations=free)
    return ProgramCursor(0, program, lambda: {id(p) for p in parameters}, torch.device("cpu"))


def step_of(func, line, *, draws):
    return Step(func=func, node=None, draws=(A_DRAW,) if draws else (), line=line)


def deferred(*shape: int) -> Tensor:
    return DeferredTensor(torch.empty(shape, device="meta"), 0)


def places(calls, at: ProgramCursor) -> list[Any]:
    found = [at.operation(func, args, {}) for func, args in calls]
    return [None if instruction is None else instruction.place for instruction in found]


TABLE = ((torch.arange, FREE), (torch.mul, FREE), (torch.mul, ELSEWHERE), (torch.add, ELSEWHERE))


def test_free_calls_may_be_missing():
    x = deferred(3)
    at = cursor(*TABLE)
    assert places([(torch.mul, (x, 2)), (torch.add, (x, torch.ones(3)))], at) == [ELSEWHERE, ELSEWHERE]
    at.end()


def test_free_calls_may_be_more():
    x, table = deferred(3), torch.ones(3)
    at = cursor(*TABLE[2:])
    calls = [(torch.arange, (3,)), (torch.mul, (table, 2)), (torch.mul, (x, 2)), (torch.add, (x, table))]
    assert places(calls, at) == [None, None, ELSEWHERE, ELSEWHERE]
    at.end()


def test_calls_that_have_a_place_may_not():
    x = deferred(3)
    with pytest.raises(TraceMismatchError, match=r"calls add\(\) where the trace has mul\(\)"):
        cursor(*TABLE).operation(torch.add, (x, 1), {})
    at = cursor(*TABLE)
    at.operation(torch.mul, (x, 2), {})
    with pytest.raises(TraceMismatchError, match=r"user.py:3: .* calls nothing more where the trace has add"):
        at.end()


def test_random_numbers_are_taken_as_in_the_trace():
    x = deferred(3)
    with pytest.raises(TraceMismatchError, match=r"where the trace has rand\(\)"):
        cursor((torch.rand, FREE, True), (torch.add, ELSEWHERE)).operation(torch.add, (x, 1), {})
    at = cursor((torch.add, ELSEWHERE))
    assert at.operation(torch.rand, (2,), {}) is None
    with pytest.raises(TraceMismatchError, match=r"calls rand\(\)"):
        at.run_unknown(torch.rand, (2,), {})
    assert torch.equal(at.run_unknown(torch.arange, (2,), {}), torch.arange(2))


def test_backward_comes_where_it_came_in_the_trace():
    x = deferred(3)
    steps = ((torch.mul, ELSEWHERE), (torch.arange, FREE), (torch.add, ELSEWHERE))
    at = cursor(*steps, backward_at=2)
    with pytest.raises(TraceMismatchError, match=r"calls backward\(\) where the trace has mul\(\)"):
        at.backward()
    at.operation(torch.mul, (x, 2), {})
    with pytest.raises(TraceMismatchError, match=r"calls add\(\) where the trace has backward\(\)"):
        cursor(*steps[1:], backward_at=1).operation(torch.add, (x, 1), {})
    at.backward()
    at.operation(torch.add, (x, 1), {})
    at.end()
    with pytest.raises(TraceMismatchError):
        at.backward()


arguments = st.recursive(
    st.sampled_from(["free", "deferred", "made", 1, None, "text", slice(1, 2)]),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
    max_leaves=6,
)


@given(st.lists(arguments), st.dictionaries(st.text(), arguments))
def test_one_bound_tensor_anywhere_binds_the_call(args, kwargs):
    at = cursor((torch.add, ELSEWHERE))
    made = torch.ones(1)
    at.note_made(made, (), {})
    tensors = {"free": torch.ones(1), "deferred": deferred(1), "made": made}

    def fill(item):
        if isinstance(item, dict):
            return {key: fill(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(map(fill, item))
        return tensors.get(item, item) if isinstance(item, str) else item

    bound = any(item in ("deferred", "made") for item in leaves((args, kwargs)))
    found = at.operation(torch.add, tuple(fill(args)), fill(kwargs))
    assert (found is not None) == bound


def test_what_a_step_of_this_rank_gave_is_not_free():
    at = cursor()
    made, given_back = torch.ones(2), torch.ones(2)
    at.note_made({"made": made, "mask": given_back}, [given_back], {0: 7})
    assert at.value_of(made) == 7
    assert not at.is_free(made)
    assert at.is_free(given_back)
    assert at.is_free(torch.ones(2))
    at.clear()
    assert at.is_free(made)


def test_parameters_of_the_model_are_not_free():
    own, foreign = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    at = cursor(parameters=[own])
    assert not at.is_free(own)
    assert at.is_free(foreign)

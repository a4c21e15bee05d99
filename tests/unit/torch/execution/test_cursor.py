"""Calls of a step function are looked up in a program: those that are free may differ from the trace.

What a step function returns behind the end of its program.

Values that one rank puts up for others in a microbatch, and what these are told where there is none.
"""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shardwright.errors import TraceMismatchError
from shardwright.torch.execution.microbatches.cursor import Cursor
from shardwright.torch.execution.microbatches.program_end import ProgramEnd
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
    graph = SimpleNamespace(loss=None)
    trace = SimpleNamespace(backward_at=backward_at, random=RandomUse(), graph=graph, result_values=())
    program: Any = SimpleNamespace(instructions=instructions, trace=trace, free_operations=free)
    return Cursor(
        0,
        program,
        lambda: {id(p) for p in parameters},
        torch.device("cpu"),
        lambda: None,
        around=nullcontext,
        before_pause=lambda: None,
    )


def step_of(func, line, *, draws):
    return Step(func=func, node=None, draws=(A_DRAW,) if draws else (), line=line)


def deferred(*shape: int) -> Tensor:
    return DeferredTensor(torch.empty(shape, device="meta"), 0)


TABLE = ((torch.arange, FREE), (torch.mul, FREE), (torch.mul, ELSEWHERE), (torch.add, ELSEWHERE))


def test_calls_that_have_a_place_may_not():
    x = deferred(3)
    with pytest.raises(TraceMismatchError, match=r"calls add\(\) where the trace has mul\(\)"):
        cursor(*TABLE).operation(torch.add, (x, 1), {})
    at = cursor(*TABLE)
    at.operation(torch.mul, (x, 2), {})
    with pytest.raises(TraceMismatchError, match=r"user.py:3: .* calls nothing more where the trace has add"):
        at.end(None)


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
        at.backward(None)
    at.operation(torch.mul, (x, 2), {})
    with pytest.raises(TraceMismatchError, match=r"calls add\(\) where the trace has backward\(\)"):
        cursor(*steps[1:], backward_at=1).operation(torch.add, (x, 1), {})
    at.backward(None)
    at.operation(torch.add, (x, 1), {})
    at.end(None)
    with pytest.raises(TraceMismatchError):
        at.backward(None)


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


LOSS = torch.ones(())


@pytest.mark.parametrize(("loss", "at"), [(LOSS, 1), (None, None)])
def test_a_none_that_is_returned_is_no_loss(loss, at):
    """It counted as one where no backward was called, so that the losses of the batch were [None]."""
    program: Any = SimpleNamespace(stages=(0,), loss_stage=0)
    at_end = cursor()
    at_end.behind_backward = loss is not None
    nothing: Any = None
    end = ProgramEnd(0, program, at_end, nothing, nothing, torch.device("cpu"))
    returned = end.returned({"aside": None, "loss": LOSS}, loss)
    assert returned.trains == (loss is not None)
    assert returned.loss_at == at

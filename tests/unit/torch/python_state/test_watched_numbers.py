"""Numbers among the arguments of a traced step function, and for which others the trace holds."""

import copy
import math
import numbers
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.torch.python_state.watched_numbers import (
    NumberReads,
    WatchedNumber,
    plain_numbers,
)
from shardwright.torch.pytorch.tree import flatten


def watched(*values: Any) -> tuple[NumberReads, list[Any]]:
    reads = NumberReads()
    return reads, reads.watched(*flatten(list(values)))


def schedule(step: Any, warmup: Any) -> tuple[bool, ...]:
    """What scripts ask of a step number."""
    answers = [step % 4 == 0, step == warmup, not step, step < warmup / 2]
    if step >= warmup:
        answers.append((step - warmup) // 3 > 2)
    if 0 < step <= 2 * warmup + 1 and -step < -1:
        answers.append(bool(divmod(step, 5)[1]))
    return tuple(bool(answer) for answer in answers)


@given(st.integers(0, 40), st.integers(1, 9), st.integers(0, 40), st.integers(1, 9))
def test_a_path_is_taken_by_numbers_with_the_same_answers_alone(step, warmup, other, other_warmup):
    reads, (a, b) = watched(step, warmup)
    assert schedule(a, b) == schedule(step, warmup)
    taken = reads.path().taken_by([other, other_warmup])
    assert not taken or schedule(other, other_warmup) == schedule(step, warmup)
    assert reads.path().taken_by([step, warmup])


def test_what_is_never_looked_at_does_not_matter():
    reads, (number, tensor, truth, text) = watched(3, torch.ones(2), True, "a")
    assert (type(number), truth, text) == (WatchedNumber, True, "a")
    assert isinstance(number, int)
    assert isinstance(number, numbers.Number)
    assert not isinstance(number, float)
    assert number != None  # noqa: E711
    assert number != "a"
    assert number is not None
    path = reads.path()
    assert not path.steps
    assert path.taken_by([4, tensor, truth, text])


WANTS_IT = {
    "an index": lambda n: [1, 2, 3, 4][n],
    "a slice": lambda n: [1, 2, 3, 4][:n],
    "a range": lambda n: list(range(n)),
    "int": int,
    "float": float,
    "a text": str,
    "an f-string": lambda n: f"{n:03d}",
    "an old format": lambda n: "%d" % n,  # noqa: UP031
    "a key": lambda n: {1: 2}.get(n),
    "a set": lambda n: n in {1, 2},
    "round": round,
    "floor": math.floor,
    "sqrt": math.sqrt,
    "times a text": lambda n: "a" * n,
    "times a list": lambda n: [0] * n,
    "plus a tensor": lambda n: n + torch.ones(2),
    "a copy": copy.deepcopy,
    "a method": lambda n: n.bit_length(),
    "what is computed": lambda n: int((n + 1) * 2.5),
    "an operation": lambda n: plain_numbers([torch.ones(2), n]),
    "a slice of a tensor": lambda n: plain_numbers([slice(None, n)]),
}


@pytest.mark.parametrize("use", WANTS_IT.values(), ids=WANTS_IT)
def test_a_number_that_is_wanted_itself_is_bound_and_no_other(use):
    """One number that an operation took made all numbers matter: a step number beside a weight."""
    reads, (number, step) = watched(3, 7)
    use(number)
    assert step % 100 != 0
    path = reads.path()
    assert path.taken_by([3, 8])
    assert not path.taken_by([3, 100])
    assert not path.taken_by([4, 8])


def test_what_cannot_be_computed_is_another_path():
    reads, (a, b) = watched(6, 2)
    assert a // b == 3
    assert not reads.path().taken_by([6, 0])
    assert reads.path().taken_by([9, 3])

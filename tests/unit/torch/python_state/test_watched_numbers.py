"""Numbers among the arguments of a traced step function, and for which others the trace holds."""

import contextlib
import copy
import dataclasses
import json
import math
import numbers
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.torch.python_state.watched_numbers import (
    NumberMatters,
    NumberReads,
    WatchedNumber,
    numbers_among,
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


def test_a_trace_that_wants_all_numbers_themselves_has_no_path():
    reads, (number, step) = watched(3, 7)
    assert [0, 1, 2, 3][number] + int(step) == 10
    assert reads.path() is None


def test_many_questions_end_the_trace():
    _, (number,) = watched(3)
    with pytest.raises(NumberMatters):
        assert [number == k for k in range(1000)]


def test_behind_the_trace_it_is_a_number_as_any():
    """One may be left in a variable of the script."""
    reads, (number, half) = watched(3, 0.5)
    reads.path()
    assert [1, 2, 3, 4][number] == 4
    assert f"{number:03d}" == "003"
    assert float(number + half) == 3.5
    assert json.dumps(copy.deepcopy(number)) == "3"
    assert hash(number) == hash(3)
    assert number in {3}
    assert (number**2, 2**number, pow(number, 2, 5), -number, abs(number)) == (9, 8, 4, -3, 3)
    assert math.sqrt(number) == math.sqrt(3)
    assert "a" * number == "aaa"
    assert round(half) == 0


def test_what_cannot_be_computed_is_another_path():
    reads, (a, b) = watched(6, 2)
    assert a // b == 3
    assert not reads.path().taken_by([6, 0])
    assert reads.path().taken_by([9, 3])


def test_what_fails_for_another_number_is_another_path():
    """Python may catch the error, and go on elsewhere."""
    reads, (number,) = watched(3)
    assert 1 / number
    path = reads.path()
    assert path.taken_by([4])
    assert not path.taken_by([0])
    reads, (number, _) = watched(0, 5)
    with pytest.raises(ZeroDivisionError):
        1 / number
    path = reads.path()
    assert path.taken_by([0, 6])
    assert not path.taken_by([3, 6])


def test_what_another_number_makes_complex_is_another_path():
    reads, (number,) = watched(50)
    assert (number - 10) ** 0.5 > 2
    path = reads.path()
    assert path.taken_by([60])
    assert not path.taken_by([5])


def test_long_formulas_want_the_number_itself():
    """Computing them again would take too long."""
    reads, (number,) = watched(0.5)
    with contextlib.suppress(NumberMatters):
        for _ in range(200):
            number = number * (2.0 - number)
    assert reads.matter


def test_the_same_question_may_be_asked_often():
    """By every layer of a deep model."""
    reads, (number,) = watched(200)
    for _ in range(1000):
        assert number % 100 == 0
    assert [reads.path().taken_by([other]) for other in (300, 201)] == [True, False]


def test_code_that_catches_everything_does_not_hide_that_a_number_matters():
    reads, (number,) = watched(3)
    with contextlib.suppress(BaseException):
        [1, 2, 3, 4][number]
    assert reads.path() is None


@dataclasses.dataclass
class Info:
    step: int

    def __post_init__(self) -> None:
        self.is_warm = self.step > 3


def test_numbers_in_containers_with_more_than_them_are_not_watched():
    items, structure = flatten([1, {"a": 2.0}, (Info(3), True), Counter(a=4)])
    assert numbers_among(items, structure) == [True, True, False, False, False]

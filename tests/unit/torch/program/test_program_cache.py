"""Which microbatches may run by one program."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shardwright.torch.batch.batch import Batch
from shardwright.torch.program.program_cache import (
    _NUMBERS_TOLD,
    ProgramCache,
    signature_of,
)
from shardwright.torch.python_state.watched_numbers import NumberReads
from shardwright.torch.tracing.path import PathRecorder


def signature(*args):
    return signature_of(part(*args))


def test_values_of_tensors_do_not_count():
    assert signature(torch.zeros(2, 3), "a") == signature(torch.ones(2, 3), "a")


@pytest.mark.parametrize(
    "values",
    [
        (True, 1, 1.0, "1", b"1"),
        (0.0, -0.0),
        (torch.zeros(2), torch.zeros(3), torch.zeros(2).double(), torch.zeros(2).requires_grad_()),
        (torch.zeros(2, 3), torch.zeros(3, 2).t()),  # changes in place go by the place in memory
        (torch.float16, torch.bfloat16),
        (slice(1), slice(2)),
        ([1, 2], (1, 2)),
    ],
)
def test_what_python_can_tell_apart_is_told_apart(values):
    for first, second in itertools.combinations(values, 2):
        assert signature(first) != signature(second)


@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: slice(1, None), lambda: torch.device("cpu")])
def test_a_value_that_comes_anew_with_every_batch_is_the_same(make):
    assert signature(make()) == signature(make())
    assert hash(signature(make())) == hash(signature(make()))


class Program:
    pass


def part(*args):
    return Batch((args, {}))


TRACE = SimpleNamespace(path=PathRecorder(()).path(nn.Module(), {}))


def test_numbers_that_come_in_turns_are_traced_once_each():
    """Timesteps, for example; only so many were kept that none was left when its turn came."""
    cache = ProgramCache()
    for step in range(100):
        cache.keep(part(torch.zeros(2), step), "function", TRACE, Program())
    assert all(cache.find(part(torch.zeros(2), step), "function") is not None for step in range(100))
    assert len(cache._numbers) == 1


def test_a_number_that_is_another_one_in_every_step_is_told_once(caplog):
    """Each was a trace, of seconds in large models, without a word."""
    cache, told = ProgramCache(), []
    for step in range(3 * _NUMBERS_TOLD):
        cache.keep(part(torch.zeros(2), step, 0.5), "function", TRACE, Program(), where="train.py:7")
        told.append(len(caplog.records))
    assert told[_NUMBERS_TOLD - 2 : _NUMBERS_TOLD] == [0, 1]
    assert told[-1] == 1
    assert "function at train.py:7 was traced" in caplog.text
    assert "(0, 1, 2, 3, 4, 5, 6, 7)" in caplog.text


def test_numbers_are_watched_where_others_have_come():
    cache, x = ProgramCache(), torch.zeros(2)
    assert not cache.watches_numbers(part(x, 0), "function")
    cache.keep(part(x, 0), "function", TRACE, Program())
    assert not cache.watches_numbers(part(x, 0), "function")  # traced again, for a reason of its own
    assert not cache.watches_numbers(part(x, 1), "another function")
    assert not cache.watches_numbers(part(x, 1.0), "function")
    assert cache.watches_numbers(part(x, 1), "function")


def test_a_program_may_hold_for_other_numbers():
    cache, x, general = ProgramCache(), torch.zeros(2), Program()
    reads = NumberReads()
    _, step = reads.watched(part(x, 3).leaves, part(x, 3).structure)
    assert step % 10 != 0
    cache.keep(part(x, 0), "function", TRACE, Program())
    cache.keep(part(x, 3), "function", TRACE, general, watched=True, numbers=reads.path())
    assert cache.find(part(x, 7), "function") is general
    assert cache.find(part(x, 10), "function") is None
    assert cache.find(part(x, 0), "function") is not general
    assert cache.find(part(torch.zeros(3), 7), "function") is None
    assert cache.find(part(x, 7.0), "function") is None

"""Which microbatches may run by one program."""

import gc
import itertools
from types import SimpleNamespace

import pytest
import torch

from shardwright.torch.program_cache import _NUMBERS_TOLD, _SIGNATURES_KEPT, ProgramCache, signature_of


def signature(*args):
    return signature_of((args, {}))


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


class Options:
    pass


def test_another_object_at_the_place_of_one_that_is_gone_is_another():
    options = Options()
    before = signature(options)
    assert before == signature(options)
    address = id(options)
    del options
    gc.collect()
    others = [Options() for _ in range(1000)]
    again = [other for other in others if id(other) == address]
    if not again:
        pytest.skip("Python did not use the address again")
    assert signature(again[0]) != before


class Program:
    pass


def test_arguments_that_change_every_step_do_not_fill_the_memory():
    cache = ProgramCache()
    trace = SimpleNamespace(reads_data=False, path=None)
    often = signature("often")
    cache.keep(often, trace, Program())
    for step in range(3 * _SIGNATURES_KEPT):
        cache.keep(signature(step), trace, Program())
        assert cache.find(often, ((), {})) is not None
    assert len(cache._entries) == _SIGNATURES_KEPT
    assert cache.find(signature(0), ((), {})) is None
    assert cache.find(signature(3 * _SIGNATURES_KEPT - 1), ((), {})) is not None


def test_a_number_that_is_another_one_in_every_step_is_told_once(caplog):
    """Each was a trace, of seconds in large models, without a word."""
    trace = SimpleNamespace(reads_data=False, path=None)
    cache, told = ProgramCache(), []
    for step in range(3 * _NUMBERS_TOLD):
        cache.keep(("function", signature(torch.zeros(2), step, 0.5)), trace, Program())
        told.append(len(caplog.records))
    assert told[_NUMBERS_TOLD - 2 : _NUMBERS_TOLD] == [0, 1]
    assert told[-1] == 1
    assert "(0, 1, 2, 3, 4, 5, 6, 7)" in caplog.text


def test_shapes_and_functions_are_no_numbers(caplog):
    trace = SimpleNamespace(reads_data=False, path=None)
    cache = ProgramCache()
    for length in range(2 * _NUMBERS_TOLD):
        cache.keep(("function", signature(torch.zeros(length), 1)), trace, Program())
        cache.keep((f"function {length}", signature(torch.zeros(2), 1)), trace, Program())
        cache.keep(("path", signature(torch.zeros(2), 1)), trace, Program())
    assert not caplog.records


def test_a_signature_that_comes_back_is_no_other_number(caplog):
    """It had been dropped for others, and what changed was looked for in vain."""
    trace = SimpleNamespace(reads_data=False, path=None)
    cache = ProgramCache()
    for _ in range(2 * _NUMBERS_TOLD):
        cache.keep(("function", signature(torch.zeros(2), 0.1)), trace, Program())
        cache._entries.clear()
    assert not caplog.records

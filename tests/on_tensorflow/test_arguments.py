"""The arguments of a step function."""

import numpy as np
import pytest
import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow.batch import Splitter


def arguments(*given):
    splitter = Splitter(names=("x", "y"))
    return splitter(given, {})


class Series:
    """As pandas has them: no array, and made into one."""

    def __array__(self, dtype=None, copy=None):
        return np.arange(4.0, dtype=dtype)


class Frame(Series):
    """A table of pandas has an ``assign`` of its own, as variables have."""

    def assign(self, **columns):
        raise NotImplementedError


@pytest.mark.parametrize("kind", [Series, Frame])
def test_what_becomes_an_array_is_cut(kind):
    """Bug: every microbatch got the whole series."""
    parts = arguments(tf.zeros([4, 2]), kind()).parts(2)
    assert [part[1].numpy().tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0]]


def test_variables_and_plain_numbers_stay_whole():
    assert arguments(tf.Variable([1.0, 2.0]), 3.0).tensors == []


@pytest.mark.parametrize("make", [tf.ragged.constant, tf.sparse.from_dense])
def test_what_cannot_be_cut_is_refused(make):
    """Bug: every microbatch got the whole batch of it."""
    with pytest.raises(UsageError, match=r"the argument x .* Make it a dense tensor before"):
        arguments(make([[1, 0], [2, 3]]), None)

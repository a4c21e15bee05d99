"""What a loss is to its samples is found out from two traces, in one process.

The arguments of a step function.
"""

import numpy as np
import pytest
import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow.batch import Splitter
from shardwright.tensorflow.loss_reduction import loss_reduction
from shardwright.tensorflow.recorder import Recorder
from shardwright.tensorflow.trace import trace_step
from shardwright.tensorflow.units import choose_units

WIDTH = 5


def _found(loss_of, layer, given=lambda x: x):
    def step(x, labels, weights):
        with tf.GradientTape() as tape:
            loss = loss_of(layer(given(x)), labels, weights)
        return tape.gradient(loss, layer.kernel.value), loss

    layer.build([None, WIDTH])
    traces = [
        trace_step(
            step,
            [tf.TensorSpec([n, WIDTH]), tf.TensorSpec([n], tf.int32), tf.TensorSpec([n])],
            recorder=Recorder(),
        )
        for n in (3, 6)
    ]
    units = choose_units(traces[0].recorder.calls, {id(layer): "layer"}, wanted=1)
    graph = traces[0].step_graph(units, is_of_model=lambda variable: True)
    return loss_reduction(graph, *traces, traces[0].recorder.losses)


def _softmax(y, labels):
    return tf.nn.sparse_softmax_cross_entropy_with_logits(labels, y)


def _contrast(y, labels, weights):
    return tf.reduce_mean(tf.nn.log_softmax(tf.matmul(y, y, transpose_b=True)))


CASES = {
    "mean": (lambda y, _, w: tf.reduce_mean(y**2), "mean"),
    "labels": (lambda y, labels, w: tf.reduce_mean(_softmax(y, labels)), "mean"),
    "weighted": (lambda y, labels, w: tf.reduce_mean(_softmax(y, labels) * w), "mean"),
    "regularized": (lambda y, _, w: tf.reduce_mean(y**2) + 3.0, "mean"),
    "noise": (lambda y, _, w: tf.reduce_mean((y - tf.random.normal(tf.shape(y))) ** 2), "mean"),
    "keras noise": (
        lambda y, _, w: tf.reduce_mean((y - tf.keras.random.normal((y.shape[0], 5), seed=3)) ** 2),
        "mean",
    ),
    "sum": (lambda y, _, w: tf.reduce_sum(y**2) * 0.5, "sum"),
    "a row a sample": (lambda y, labels, w: _softmax(y, labels), "sum"),
    "sum by weights": (lambda y, labels, w: tf.reduce_sum(_softmax(y, labels) * w), "sum"),
    "mean by weights": (
        lambda y, labels, w: tf.reduce_sum(_softmax(y, labels) * w) / tf.reduce_sum(w),
        "mean",
    ),
    "mask": (
        lambda y, labels, w: tf.math.divide_no_nan(
            tf.reduce_mean(_softmax(y, labels) * tf.cast(labels > 0, "float32")),
            tf.reduce_mean(tf.cast(labels > 0, "float32")),
        ),
        "mean",
    ),
    "root": (lambda y, _, w: tf.sqrt(tf.reduce_mean(y**2)), "neither"),
    "contrast": (_contrast, "neither"),
    "product": (lambda y, _, w: tf.reduce_mean(y**2) * tf.reduce_mean(w), "neither"),
    "by the largest": (lambda y, _, w: tf.reduce_mean(y**2) / tf.reduce_max(w), "neither"),
    "mixed": (lambda y, _, w: tf.reduce_sum(y**2) + 3.0, "neither"),
    "statistics": (lambda y, _, w: tf.reduce_mean((y - tf.reduce_mean(y, 0)) ** 2), "neither"),
    "no number": (lambda y, _, w: tf.reduce_mean(tf.math.log(y - 1000.0)), "unknown"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_a_loss_is_to_its_samples(case):
    loss_of, kind = CASES[case]
    layer = tf.keras.layers.Dense(WIDTH)
    found = _found(loss_of, layer)
    assert found.kind == kind
    assert len(found.divisors) == (case in ("mean by weights", "mask"))
    if kind in ("neither", "unknown"):
        assert "test_loss_reduction.py" in found.line


def _of_real_and_fake(y, labels, weights):
    """The loss of a discriminator, as examples of Keras have it."""
    ones = tf.ones_like(weights)
    return tf.reduce_mean(tf.concat([ones, 0 * ones], 0)[:, None] * y**2)


@pytest.mark.parametrize(("loss_of", "kind"), [(_of_real_and_fake, "mean"), (_contrast, "neither")])
def test_rows_behind_one_another_have_a_part_of_each(loss_of, kind):
    """Real pictures and fake ones in one call: their halves were taken for those of the batch."""
    found = _found(loss_of, tf.keras.layers.Dense(WIDTH), lambda x: tf.concat([x, 2 * x], 0))
    assert found.kind == kind


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

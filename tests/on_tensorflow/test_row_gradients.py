"""Gradients that are rows of a variable: the rows of microbatches come together as one process has them."""

import numpy as np
import pytest
import tensorflow as tf

from shardwright.tensorflow.row_gradients import fixed_rows, rows_together
from shardwright.tensorflow.trace import trace_step

LENGTH, SAMPLES, BATCH = 6, 2, 8
PLACES = tf.Variable(tf.range(LENGTH), trainable=False)
TABLE = tf.Variable(tf.random.stateless_normal([200, 3], [1, 2]))

# What looks rows up, for ids of shape (samples, LENGTH) -> whether the whole batch has as many rows.
LOOKUPS = {
    "range": (lambda x: tf.range(LENGTH)[None], True),
    "variable": (lambda x: PLACES, True),
    "repeated": (lambda x: tf.constant([3, 1, 3, 3]), True),
    "function": (tf.function(lambda x: PLACES + 0 * x[0]), True),
    "samples": (lambda x: x, False),
    "types": (lambda x: tf.zeros([x.shape[0], LENGTH], tf.int32), False),
    "types by values": (lambda x: tf.zeros_like(x), False),
    "of unknown number": (lambda x: tf.boolean_mask(x, x > 3), False),
}


def _trace(rows_of, samples):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(TABLE, rows_of(x)) ** 2)
        return None, loss, tape.gradient(loss, TABLE)

    return trace_step(step, [tf.TensorSpec([samples, LENGTH], tf.int32)])


@pytest.mark.parametrize("samples", [SAMPLES, 1])
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_are_fixed_if_the_whole_batch_has_as_many(name, samples):
    rows_of, is_fixed = LOOKUPS[name]
    trace = _trace(rows_of, samples)
    for whole in (BATCH, None):  # None: the caller's function knows no number of samples
        sizes = None if whole is None else (samples, whole)
        found = fixed_rows(trace, lambda size=whole: _trace(rows_of, size), samples=sizes)
        # By number of the output; the first one is None. Static sizes are not there without a batch size.
        assert found == ({2} if is_fixed else frozenset())
        if name == "types":
            break


def test_without_rows_nothing_is_traced_again():
    trace = trace_step(lambda x: tf.reduce_sum(x), [tf.TensorSpec([2])])
    assert fixed_rows(trace, lambda: pytest.fail("traced")) == frozenset()


def test_a_table_for_samples_and_positions_is_told():
    def rows_of(x):
        return tf.concat([tf.reshape(x, [-1]), tf.range(5)], 0)

    with pytest.warns(UserWarning, match="has 17 rows for 2 samples and 53 for 8 .*table of their own"):
        assert not fixed_rows(_trace(rows_of, SAMPLES), lambda: _trace(rows_of, BATCH), samples=(2, 8))


def test_a_step_for_microbatches_alone_is_told():
    def rows_of(x):
        return tf.range(LENGTH) + tf.ensure_shape(x, [SAMPLES, LENGTH])

    with pytest.warns(UserWarning, match="for which the step function fails"):
        assert not fixed_rows(_trace(rows_of, SAMPLES), lambda: _trace(rows_of, BATCH), samples=(2, 8))


@pytest.mark.parametrize("wrapped", [lambda f: f, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("indices", "are_fixed", "together", "values"),
    [
        ([[3, 1, 3], [3, 1, 3]], True, [3, 1, 3], [2.0, 3.0, 4.0]),
        ([[3, 1, 3], [3, 1, 3]], False, [3, 1, 3, 3, 1, 3], [0.5, 1.0, 1.5, 1.5, 2.0, 2.5]),
        ([[3, 1, 3], [3, 2, 3]], True, [3, 1, 3, 3, 2, 3], [0.5, 1.0, 1.5, 1.5, 2.0, 2.5]),
    ],
    ids=["added", "samples", "random"],
)
def test_fixed_rows_are_added_up_and_others_stand_behind_each_other(
    indices, are_fixed, together, values, wrapped
):
    given = zip([[[1.0], [2.0], [3.0]], [[3.0], [4.0], [5.0]]], indices, strict=True)
    parts = [tf.IndexedSlices(tf.constant(v), tf.constant(i), tf.constant([9, 1])) for v, i in given]
    found = wrapped(lambda *each: rows_together(each, scale=0.5, are_fixed=are_fixed))(*parts)
    assert found.indices.numpy().tolist() == together
    np.testing.assert_allclose(found.values[:, 0], values)

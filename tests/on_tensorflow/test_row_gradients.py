"""Gradients that are rows of a variable: the rows of microbatches come together as one process has them."""

import numpy as np
import pytest
import tensorflow as tf

from shardwright.tensorflow.row_gradients import Rows, rows_of, rows_together
from shardwright.tensorflow.trace import trace_step

LENGTH, SAMPLES, BATCH = 6, 2, 8
PLACES = tf.Variable(tf.range(LENGTH), trainable=False)
OUTSIDE = tf.constant([2, 4])
TABLE = tf.Variable(tf.random.stateless_normal([200, 3], [1, 2]))

# What makes indices of ids, of shape (samples, LENGTH) -> how many follow from no sample.
LOOKUPS = {
    "range": (lambda x: tf.range(LENGTH)[None], LENGTH),
    "variable": (lambda x: PLACES, LENGTH),
    "outside": (lambda x: OUTSIDE, 2),
    "repeated": (lambda x: tf.constant([3, 1, 3, 3]), 4),
    "function": (tf.function(lambda x: PLACES + 0 * x[0]), LENGTH),
    "samples": (lambda x: x, 0),
    "types": (lambda x: tf.zeros([x.shape[0], LENGTH], tf.int32), 0),
    "types by values": (lambda x: tf.zeros_like(x), 0),
    "of unknown number": (lambda x: tf.boolean_mask(x, x > 3), 0),
}


def _trace(indices_of, samples, recorder=None, *, behind=lambda: None):
    """Of a step whose lookup has indices of its argument; `behind` is called when the rows are there."""

    def step(x):
        with tf.GradientTape() as tape:
            rows = tf.gather(TABLE, indices_of(x))
            behind()
            loss = tf.reduce_sum(rows**2)
        return None, loss, tape.gradient(loss, TABLE)

    return trace_step(step, [tf.TensorSpec([samples, LENGTH], tf.int32)], recorder=recorder)


def _rows(indices_of, samples, whole, **options):
    """Of the gradient, which is the second output; the first one is None."""
    sizes = None if whole is None else (samples, whole)
    found = rows_of(
        _trace(indices_of, samples),
        lambda recorder: _trace(indices_of, whole, recorder, **options),
        samples=sizes,
    )
    assert found.keys() <= {2}
    return found.get(2)


@pytest.mark.parametrize("samples", [SAMPLES, 1])
@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_are_fixed_if_the_whole_batch_has_as_many(name, samples):
    indices_of, count = LOOKUPS[name]
    for whole in (BATCH, None):  # None: the caller's function knows no number of samples
        expected = (Rows(count, are_fixed=True),) if count else None
        assert _rows(indices_of, samples, whole) == expected
        if name == "types":  # static sizes are not there without a batch size
            break


@pytest.mark.parametrize("whole", [BATCH, None])
def test_a_table_for_samples_and_positions_has_both_apart(whole):
    def indices_of(x):
        return tf.concat([tf.reshape(x, [-1]), x[:, 0], tf.range(5), tf.reshape(x, [-1])], 0)

    counts = SAMPLES * LENGTH + SAMPLES, 5, SAMPLES * LENGTH
    expected = tuple(Rows(count, are_fixed=count == 5) for count in counts)
    assert _rows(indices_of, SAMPLES, whole) == expected


def test_the_trace_of_the_whole_batch_ends_with_the_indices():
    for indices_of, _ in LOOKUPS.values():
        if indices_of is not LOOKUPS["of unknown number"][0]:
            _rows(indices_of, SAMPLES, BATCH, behind=lambda: pytest.fail("traced on"))


def test_without_rows_nothing_is_traced_again():
    trace = trace_step(lambda x: tf.reduce_sum(x), [tf.TensorSpec([2])])
    assert rows_of(trace, lambda recorder: pytest.fail("traced")) == {}


def _slices(values, indices):
    return tf.IndexedSlices(tf.constant(values)[:, None], tf.constant(indices), tf.constant([9, 1]))


FIXED = (Rows(3, are_fixed=True),)


@pytest.mark.parametrize("wrapped", [lambda f: f, tf.function], ids=["eager", "graph"])
@pytest.mark.parametrize(
    ("indices", "rows", "together", "values"),
    [
        ([[3, 1, 3], [3, 1, 3]], FIXED, [3, 1, 3], [2.0, 3.0, 4.0]),
        ([[3, 1, 3], [3, 1, 3]], (), [3, 1, 3, 3, 1, 3], [0.5, 1.0, 1.5, 1.5, 2.0, 2.5]),
        ([[3, 1, 3], [3, 2, 3]], FIXED, [3, 1, 3, 3, 2, 3], [0.5, 1.0, 1.5, 1.5, 2.0, 2.5]),
    ],
    ids=["added", "samples", "random"],
)
def test_fixed_rows_are_added_up_and_others_stand_behind_each_other(indices, rows, together, values, wrapped):
    parts = [_slices([1.0, 2.0, 3.0], indices[0]), _slices([3.0, 4.0, 5.0], indices[1])]
    found = wrapped(lambda *each: rows_together(each, scale=0.5, rows=rows))(*parts)
    assert found.indices.numpy().tolist() == together
    np.testing.assert_allclose(found.values[:, 0], values)

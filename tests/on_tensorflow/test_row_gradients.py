"""Gradients that are rows of a variable: dense where no sample chooses the rows."""

import numpy as np
import pytest
import tensorflow as tf

from shardwright.tensorflow.row_gradients import dense_if_fixed

LENGTH = 200  # TensorFlow makes constants of the graph of tensors with up to 128 elements
PLACES = tf.range(LENGTH)

# What looks rows up, of a batch of 4 samples -> whether the gradient comes as a dense tensor.
LOOKUPS = {
    "range": (lambda x: tf.range(6), True),
    "script's tensor": (lambda x: PLACES, True),
    "wrapped": (lambda x: tf.where(PLACES < 0, PLACES + LENGTH, PLACES)[None, :6], True),
    "samples": (lambda x: x, False),
    "in each sample": (lambda x: tf.tile(tf.range(6)[None], [tf.shape(x)[0], 1]), False),
    "random": (lambda x: tf.random.uniform([6], maxval=LENGTH, dtype=tf.int32), False),
}


@pytest.mark.parametrize("name", LOOKUPS)
def test_rows_that_follow_from_no_sample_become_a_dense_tensor(name):
    rows_of, is_dense = LOOKUPS[name]
    table = tf.Variable(tf.random.normal([LENGTH, 3]))

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, rows_of(x)) ** 2)
        gradient = tape.gradient(loss, table)
        made = dense_if_fixed(gradient)
        assert isinstance(made, tf.IndexedSlices) != is_dense
        return gradient, made

    before, after = map(tf.convert_to_tensor, step(tf.constant([[3, 1], [0, 5], [1, 1], [7, 2]])))
    np.testing.assert_array_equal(after, before)

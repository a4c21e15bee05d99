"""Horovod's collectives for TensorFlow and its optimizer for Keras, as scripts meet them."""

import numpy as np
import pytest
import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.testing import run_ranks
from smdistributed import horovod

KERAS = pytest.mark.parametrize("env", [{"TF_USE_LEGACY_KERAS": "1"}, {}], ids=["legacy", "keras3"])


def _horovod():
    horovod.provide()
    import horovod.tensorflow.keras as hvd

    hvd.init()
    return hvd


def _gradients():
    """Of each collective, the gradient of a sum with weights that differ by rank, in and out of a graph."""
    hvd = _horovod()
    rank = hvd.rank()

    def gradient(collective, *shape):
        given = tf.ones(shape, tf.float64)

        def taken():
            with tf.GradientTape() as tape:
                tape.watch(given)
                made = collective(given)
                weights = tf.reshape(tf.range(1, tf.cast(tf.size(made), tf.float64) + 1), tf.shape(made))
                found = tf.reduce_sum(made * weights * 10**rank)
            return tape.gradient(found, given)

        eagerly, in_a_graph = taken().numpy().tolist(), tf.function(taken)().numpy().tolist()
        assert eagerly == in_a_graph
        return eagerly

    with pytest.raises(UsageError, match=r"max over ranks has no gradient.*stop_gradient"):
        gradient(lambda x: hvd.allreduce(x, op=hvd.Max), 2)
    with pytest.raises(UsageError, match=r"type string was to go to another rank.*tokens"):
        hvd.broadcast(tf.constant("a"), 0)
    with pytest.raises(UsageError, match=r"XLA cannot compile. Set jit_compile=False"):
        tf.function(lambda: hvd.allreduce(1.0), jit_compile=True)()
    return {
        "mean": gradient(hvd.allreduce, 2),
        "sum": gradient(lambda x: hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0), 2),
        "rows": gradient(hvd.allgather, rank + 1, 2),
        "numbers": gradient(hvd.allgather),
        "of rank 1": gradient(lambda x: hvd.broadcast(x, 1), 2),
        "whole": hvd.allreduce(tf.constant([-3, 2, 4]) * rank).numpy().tolist(),
    }


def test_collectives_have_the_gradients_of_horovod():
    """They had none; a text ended the process; XLA named an unsupported operation."""
    same = {"mean": [5.5, 11.0], "sum": [33.0, 66.0], "whole": [-1, 1, 2]}
    first, second = run_ranks(_gradients, 2)
    assert first == same | {"rows": [[11.0, 22.0]], "numbers": 11.0, "of rank 1": [0.0, 0.0]}
    rows = [[33.0, 44.0], [55.0, 66.0]]
    assert second == same | {"rows": rows, "numbers": 22.0, "of rank 1": [11.0, 22.0]}


def _trained_in_16_bits():
    """Weights after batches of which each rank has infinite gradients for another."""
    hvd = _horovod()
    tf.keras.mixed_precision.set_global_policy("mixed_float16")
    inputs, targets = np.ones((4, 1), "float32"), np.array([[0.25], [0.5], [0.75], [0.125]], "float32")
    inputs[3 * hvd.rank()] = 1e6

    def trained(make):
        layer = tf.keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
        model = tf.keras.Sequential([tf.keras.Input((1,)), layer])
        model.compile(make(tf.keras.optimizers.SGD(0.125)), "mse")
        model.fit(inputs, targets, batch_size=1, shuffle=False, verbose=0)
        return float(model.get_weights()[0][0, 0])

    scaled = tf.keras.mixed_precision.LossScaleOptimizer
    orders = [
        hvd.DistributedOptimizer,  # Keras puts it in one that scales losses
        lambda optimizer: scaled(hvd.DistributedOptimizer(optimizer, op=hvd.Sum)),
        lambda optimizer: hvd.DistributedOptimizer(scaled(optimizer)),
    ]
    found = [trained(make) for make in orders]
    with pytest.raises(UsageError, match="wrapped by DistributedOptimizer already"):
        hvd.DistributedOptimizer(scaled(hvd.DistributedOptimizer(tf.keras.optimizers.SGD())))
    return found


@KERAS
def test_all_ranks_leave_out_the_steps_that_one_rank_must(env):
    """A rank with infinite gradients skipped the collective, and took the next step's for it."""
    expected = [0.0, 0.0]
    for target in (0.5, 0.75):
        for position, factor in enumerate((1, 2)):
            expected[position] -= factor * 0.125 * 2 * (expected[position] - target)
    for found in run_ranks(_trained_in_16_bits, 2, env=env, timeout_s=100):
        assert found == [expected[0], expected[1], expected[0]]


def _chosen_by_keras():
    """Whether Keras chooses XLA on a machine with a GPU, with and without Horovod's optimizer."""
    hvd = _horovod()
    device = tf.config.PhysicalDevice("/physical_device:GPU:0", "GPU")
    tf.config.list_physical_devices = lambda *_: [device]
    found = []
    for wrap in (hvd.DistributedOptimizer, lambda optimizer: optimizer):
        model = tf.keras.Sequential([tf.keras.Input((1,)), tf.keras.layers.Dense(1)])
        model.compile(wrap(tf.keras.optimizers.SGD(0.125)), "mse")
        found.append(model.jit_compile)
    return found


def test_keras_chooses_no_xla_for_an_optimizer_that_averages():
    assert run_ranks(_chosen_by_keras, 1) == [[False, True]]

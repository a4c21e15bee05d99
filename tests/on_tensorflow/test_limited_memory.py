"""A model whose parameters and slots are larger than what a rank may use trains over two ranks."""

import resource
from pathlib import Path

import numpy as np
from keras_features import SETTINGS

from shardwright.testing import run_ranks, run_ranks_outcomes

WIDTH, LAYERS, STEPS = 1536, 8, 2
NUM_PARAMETERS = LAYERS * WIDTH * (WIDTH + 1)
STATE_BYTES = 3 * 4 * NUM_PARAMETERS  # Adam has two numbers for each parameter
LIMIT_BYTES = int(0.95 * STATE_BYTES)


def _limit_memory():
    """Lets this process take `LIMIT_BYTES` more than it has, TensorFlow's threads and all libraries included.

    The kernel counts what is private and may be written (``RLIMIT_DATA``), and refuses more.
    """
    import tensorflow as tf

    tf.matmul(tf.ones([8, 8]), tf.ones([8, 8])).numpy()  # now its threads have their stacks
    status = Path("/proc/self/status").read_text()
    (has_kib,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmData"))
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (1024 * has_kib + LIMIT_BYTES, hard))


def _model(tf):
    dense = [tf.keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS)]
    return tf.keras.Sequential([tf.keras.Input((WIDTH,)), *dense])


def _trained(model, tf, step, mean):
    optimizer = tf.keras.optimizers.Adam(1e-3)
    x = tf.constant(np.random.RandomState(0).rand(4, WIDTH), tf.float32)
    losses = []
    for _ in range(STEPS):
        gradients, loss = step(x)
        optimizer.apply_gradients(zip(map(mean, gradients), model.trainable_variables, strict=True))
        del gradients
        losses.append(float(mean(loss)))
    return losses


def _step_of(model, tf):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    return step


def _in_one_process(is_limited):
    import tensorflow as tf

    if is_limited:
        _limit_memory()
    tf.keras.utils.set_random_seed(6)
    model = _model(tf)
    return _trained(model, tf, tf.function(_step_of(model, tf)), lambda each: each)


def _over_two_ranks():
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({"pipeline_parallel_degree": 2, **SETTINGS, "microbatches": 2})
    _limit_memory()
    tf.keras.utils.set_random_seed(6)
    with sw.delayed_initialization():
        model = _model(tf)
    model = sw.DistributedModel(model)
    losses = _trained(model, tf, sw.step(_step_of(model, tf)), lambda each: each.reduce_mean())
    sw.shutdown()
    return losses


def test_a_model_larger_than_the_limit_of_a_rank_trains():
    (expected,) = run_ranks(_in_one_process, 1, False, timeout_s=100)
    (alone,) = run_ranks_outcomes(_in_one_process, 1, True, timeout_s=100)
    assert "OOM when allocating" in alone.error
    for losses in run_ranks(_over_two_ranks, 2, timeout_s=100):
        np.testing.assert_allclose(losses, expected, rtol=1e-5)

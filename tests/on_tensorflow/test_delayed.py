"""Variables that are made in the first step, on their own rank alone."""

import contextlib

import numpy as np
import pytest
from keras_features import SETTINGS

from shardwright.testing import run_ranks

WIDTH = 48


def _elements(variables):
    """How many elements each variable has in memory here."""
    import tensorflow as tf

    from shardwright.tensorflow.variables import tf_variable

    handles = [(vars(tf_variable(each))["_handle"], each.dtype) for each in variables]
    return [int(tf.size(tf.raw_ops.ReadVariableOp(resource=h, dtype=dtype))) for h, dtype in handles]


def _layers(tf):
    L = tf.keras.layers

    class Residual(L.Layer):
        """Keras 3 calls it on symbols, to find out what it would give."""

        def __init__(self):
            super().__init__()
            self.dense = L.Dense(WIDTH, activation="tanh")

        def call(self, x):
            return x + self.dense(x)

    dense = (L.Dense(WIDTH, activation="tanh") for _ in range(2))
    return [tf.keras.Input((WIDTH,)), *dense, Residual(), L.Dense(WIDTH)]


def _message(function):
    try:
        function()
    except Exception as error:
        return str(error)
    return "no error"


def _trained(is_delayed, profile):
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({"pipeline_parallel_degree": 2, **SETTINGS, "profile": profile, "measure_s": 0.2})
    tf.keras.utils.set_random_seed(6)
    found = {}
    with sw.delayed_initialization() if is_delayed else contextlib.nullcontext():
        model = tf.keras.Sequential(_layers(tf))
    model = sw.DistributedModel(model)
    last = model.trainable_variables[-2]
    if is_delayed:
        found["before"] = _elements(model.variables)
        found["read"] = _message(lambda: np.asarray(last))
        found["added"] = _message(lambda: last.assign_add(tf.ones(last.shape)))
        found["called"] = _message(lambda: model(tf.zeros([2, WIDTH])))
    last.assign(tf.eye(WIDTH))
    optimizer = tf.keras.optimizers.Adam(0.01)

    @sw.step
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x) ** 2)
        return tape.gradient(loss, model.trainable_variables), loss

    x = tf.constant(np.random.RandomState(0).rand(8, WIDTH), tf.float32)
    found["losses"] = []
    for _ in range(3):
        gradients, loss = step(x)
        means = [each.reduce_mean() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        found["losses"].append(float(loss.reduce_mean()))
    found["after"] = _elements(model.variables)
    found["weights"] = model.get_weights()
    sw.shutdown()
    return found


def _both():
    return _trained(True, "measured"), _trained(False, "estimated")


@pytest.fixture(scope="module", params=[False, True], ids=["keras3", "legacy"])
def found(request):
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", "SHARDWRIGHT_CACHE": "off"}
    return run_ranks(_both, 2, env={**env, **({"TF_USE_LEGACY_KERAS": "1"} if request.param else {})})


def test_no_rank_has_memory_for_large_variables_before_the_first_step(found):
    for delayed, _ in found:
        assert delayed["before"] == [0, WIDTH] * 4  # biases are small


def test_a_rank_makes_its_own_variables_alone(found):
    (first, _), (second, _) = found
    whole = [WIDTH * WIDTH, WIDTH] * 4
    assert [a + b for a, b in zip(first["after"], second["after"], strict=True)] == whole
    assert 0 < sum(first["after"]) < sum(whole)


def test_values_are_those_that_they_would_have_had(found):
    for delayed, plain in found:
        assert delayed["losses"] == pytest.approx(plain["losses"], rel=1e-6)
        for mine, wanted in zip(delayed["weights"], plain["weights"], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-6)


def test_reading_one_before_is_an_error_that_says_why(found):
    for delayed, _ in found:
        for name in ("read", "added", "called"):
            assert "has no value yet" in delayed[name]
            assert "model(tf.keras.Input(shape))" in delayed[name]

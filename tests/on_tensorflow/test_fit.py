"""``compile``, ``fit``, ``evaluate`` and ``predict`` over two ranks give what they give in one process."""

import os
import warnings

import numpy as np
import pytest
from keras_features import SETTINGS

from shardwright.testing import run_ranks


def _data(num_samples=22):
    random = np.random.RandomState(5)
    return random.rand(num_samples, 6).astype("f"), random.randint(0, 3, num_samples)


def _fitted(ranks, folder):
    """What an ordinary Keras script tells; on ranks with two lines more."""
    import tensorflow as tf

    keras, layers = tf.keras, tf.keras.layers
    # Keras' own, when it looks at numbers.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    if ranks:
        import shardwright.tensorflow as sw

        sw.init({"pipeline_parallel_degree": ranks, **SETTINGS})
    keras.utils.set_random_seed(4)
    model = keras.Sequential([layers.Dense(16, activation="relu"), layers.Dense(8), layers.Dense(3)])
    if ranks:
        model = sw.DistributedModel(model)
    model.compile(
        optimizer=keras.optimizers.Adam(0.01, global_clipnorm=1.0),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = _data()
    best = keras.callbacks.ModelCheckpoint(
        f"{folder}/best.weights.h5", "loss", save_best_only=True, save_weights_only=True
    )
    found = {}
    # 22 samples in batches of 8: the last has 6, in microbatches of 2, 2, 1 and 1.
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    callbacks = [keras.callbacks.EarlyStopping(monitor="loss", patience=3), best]
    found["history"] = model.fit(
        x, y, epochs=2, callbacks=callbacks, validation_data=(x, y), **options
    ).history
    found["evaluated"] = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    found["predicted"] = model.predict(x, batch_size=8, verbose=0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer="sgd", loss=loss, metrics=["accuracy"])
    found["again"] = model.fit(x, y, **options).history
    found["weights"] = model.get_weights()
    if ranks:
        sw.shutdown()
    return found


class _WithStep:
    """A model with a step of its own, in which two optimizers have their parts."""

    def __new__(cls, base, tf):
        class Model(base):
            def __init__(self):
                super().__init__()
                self.first, self.last = tf.keras.layers.Dense(8), tf.keras.layers.Dense(3)
                self.optimizer_of_last = tf.keras.optimizers.SGD(0.3)

            def call(self, x, training=None):
                return self.last(self.first(x))

            def train_step(self, data):
                x, y = data[:2]
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                first = self.first.trainable_variables
                last = self.last.trainable_variables
                of_first, of_last = tape.gradient(loss, (first, last))
                self.optimizer.apply_gradients(zip(of_first, first, strict=True))
                self.optimizer_of_last.apply_gradients(zip(of_last, last, strict=True))
                return {"error": loss}

        return Model()


def _own_step(ranks):
    import tensorflow as tf

    tf.keras.utils.set_random_seed(4)
    base = tf.keras.Model
    if ranks:
        import shardwright.tensorflow as sw

        sw.init({"pipeline_parallel_degree": ranks, **SETTINGS})
        base = sw.DistributedModel
    model = _WithStep(base, tf)
    model.compile(optimizer="sgd")
    x, _ = _data(24)
    history = model.fit(x, x[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    if ranks:
        sw.shutdown()
    return history


def _both(ranks, folder):
    return _fitted(ranks, folder), _own_step(ranks)


@pytest.fixture(scope="module", params=[False, True], ids=["keras3", "legacy"])
def found(request, tmp_path_factory):
    """What both scripts tell: in one process, and on each of two ranks."""
    folder = tmp_path_factory.mktemp("best")
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **({"TF_USE_LEGACY_KERAS": "1"} if request.param else {})}
    (expected,) = run_ranks(_both, 1, 0, str(folder / "plain"), env=env, timeout_s=150)
    ranks = run_ranks(_both, 2, 2, str(folder), env=env, timeout_s=150)
    assert os.path.exists(folder / "best.weights.h5")
    return expected, ranks


def test_fit_over_two_ranks_is_fit(found):
    (expected, _), ranks = found
    for rank, _ in ranks:
        for name in ("history", "again"):
            assert rank[name].keys() == expected[name].keys()
            for key, values in expected[name].items():
                assert rank[name][key] == pytest.approx(values, rel=1e-5)
        assert rank["evaluated"] == pytest.approx(expected["evaluated"], rel=1e-5)
        np.testing.assert_allclose(rank["predicted"], expected["predicted"], rtol=0, atol=1e-5)
        for mine, wanted in zip(rank["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)


def test_a_train_step_of_the_users_own(found):
    (_, expected), ranks = found
    for _, history in ranks:
        assert history["error"] == pytest.approx(expected["error"], rel=1e-5)

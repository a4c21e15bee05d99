"""The number and sizes of microbatches, and replicas, never change what ``fit`` trains, or it is refused."""

import os
import re
import warnings

import numpy as np
import pytest
from keras_features import SETTINGS

from shardwright.errors import UsageError
from shardwright.testing import run_ranks

NUM_SAMPLES, BATCH = 22, 8  # the last batch has 6: microbatches of 2, 2, 1 and 1


def _functional(keras, mask=True):
    given = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(7, 6, mask_zero=mask)(given)
    x = keras.layers.Dense(8, activation="tanh")(x)
    return given, keras.layers.Dense(3, activation="softmax", name="classes")(x)


def _compiled(reduction="sum_over_batch_size"):
    def make(tf):
        keras = tf.keras
        model = keras.Model(*_functional(keras))
        loss = keras.losses.SparseCategoricalCrossentropy(reduction=reduction)
        model.compile(keras.optimizers.SGD(0.05), loss, weighted_metrics=["accuracy"])
        return model

    return make


def _function(loss):
    def make(tf):
        model = tf.keras.Model(*_functional(tf.keras, mask=False))
        model.compile(
            tf.keras.optimizers.SGD(0.05),
            lambda y, p: loss(tf, tf.one_hot(tf.cast(y, tf.int32), 3, dtype=p.dtype), p),
        )
        return model

    return make


def _own(train):
    """A ``train_step`` of one's own: what it does with (tf, model, x, y, weights)."""

    def make(tf):
        class Own(tf.keras.Model):
            def __init__(self, *args):
                super().__init__(*args)
                self.mean = tf.keras.metrics.Mean()

            def train_step(self, data):
                return train(tf, self, *data)

        model = Own(*_functional(tf.keras))
        model.compile(tf.keras.optimizers.SGD(0.05), "sparse_categorical_crossentropy")
        return model

    return make


def _errors(tf, y, p):
    return tf.keras.losses.sparse_categorical_crossentropy(y, p)


def _summed(tf, model, x, y, weights):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(_errors(tf, y, model(x, training=True))) * 0.1
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    model.mean.update_state(loss, sample_weight=tf.shape(x)[0])
    return {"loss": model.mean.result(), "last": loss}


def _masked(tf, model, x, y, weights):
    with tf.GradientTape() as tape:
        mask = tf.cast(x != 0, "float64")
        loss = tf.reduce_sum(_errors(tf, y, model(x, training=True)) * mask) / tf.reduce_sum(mask)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss}


def _clipped(tf, model, x, y, weights):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), weights)
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients, _ = tf.clip_by_global_norm(gradients, 0.1)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss}


def _norm_told(tf, model, x, y, weights):
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), weights)
    gradients = tape.gradient(loss, model.trainable_variables)
    model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return {"loss": loss, "norm": tf.norm(gradients[-1])}


def _scaled(tf, model, x, y, weights):
    """Twice the gradient, and a decay: that of the mean is their mean."""
    with tf.GradientTape() as tape:
        loss = model.compute_loss(x, y, model(x, training=True), weights)
    last = model.trainable_variables[-1]
    gradient = tape.gradient(loss, last)
    model.optimizer.apply_gradients([(2.0 * gradient + 0.1 * last, last)])
    return {"loss": loss}


EXACT = {
    "mask": _compiled(),
    "mean by weights": _compiled("mean_with_sample_weight"),
    "sum": _compiled("sum"),
    "own sum": _own(_summed),
    "own mask": _own(_masked),
    "scaled": _own(_scaled),
}
OVER_REPLICAS = ("mask", "own sum", "scaled")
REFUSED = {
    "root of a mean": (
        _function(lambda tf, y, p: tf.sqrt(tf.reduce_mean((y - p) ** 2))),
        "neither a mean nor",
    ),
    "clipped": (_own(_clipped), r"test_losses_of_fit.py:\d+: the train_step makes of gradients"),
    "norm told": (_own(_norm_told), r"test_losses_of_fit.py:\d+: the train_step makes of gradients"),
}


def _data():
    random = np.random.RandomState(5)
    x, y = random.randint(0, 7, (NUM_SAMPLES, 5)), random.randint(0, 3, (NUM_SAMPLES, 5))
    x[::3, 1:] = 0  # padding, of every third sample
    return x, y, random.uniform(0.1, 5.0, (NUM_SAMPLES, 5))


def _fitted(tf, make, batches):
    """Losses and weights of a fit on batches, each of some rows."""
    tf.keras.utils.set_random_seed(4)
    model = make(tf)
    if os.environ["WORLD_SIZE"] != "1":
        import shardwright.tensorflow as sw

        model = sw.DistributedModel(model)
    if make.__qualname__.startswith("_function."):  # of which a mean times that of weights is no mean
        batches = [batch[:2] for batch in batches]
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(batches),
        output_signature=tuple(tf.TensorSpec([None, 5], dtype) for dtype in (tf.int32, tf.int32, tf.float64))[
            : len(batches[0])
        ],
    )
    history = model.fit(dataset, epochs=2, verbose=0).history
    evaluated = model.evaluate(dataset, verbose=0, return_dict=True) if hasattr(model, "loss") else {}
    return history, evaluated, model.get_weights()


def _rows(first, last):
    return tuple(each[first:last] for each in _data())


def _each(cases, degree):
    """What each case gives on this rank; over replicas each reads its part of every batch."""
    import tensorflow as tf

    warnings.filterwarnings("ignore", category=UserWarning)
    ranks = int(os.environ["WORLD_SIZE"])
    found = {}
    before = tf.keras.backend.floatx()
    tf.keras.backend.set_floatx("float64")
    try:
        for name in cases:
            make = EXACT[name] if name in EXACT else REFUSED[name][0]
            batches = [_rows(first, first + BATCH) for first in range(0, NUM_SAMPLES, BATCH)]
            if ranks > 1:
                import shardwright.tensorflow as sw

                sw.init({**SETTINGS, "pipeline_parallel_degree": degree, "microbatches": 2 * degree})
                if degree == 1:  # 5 samples on the first replica, 3 on the second
                    cut = slice(0, 5) if sw.dp_rank() == 0 else slice(5, 8)
                    batches = [tuple(each[cut] for each in batch) for batch in batches]
            try:
                found[name] = _fitted(tf, make, batches)
            except UsageError as error:
                found[name] = str(error)
            if ranks > 1:
                sw.shutdown()
    finally:
        tf.keras.backend.set_floatx(before)
    return found


@pytest.fixture(scope="module")
def found():
    env = {"TF_CPP_MIN_LOG_LEVEL": "3"}
    (plain,) = run_ranks(_each, 1, list(EXACT), 1, env=env, timeout_s=500)
    pipeline = run_ranks(_each, 2, [*EXACT, *REFUSED], 2, env=env, timeout_s=500)
    replicas = run_ranks(_each, 2, list(OVER_REPLICAS), 1, env=env, timeout_s=500)
    return plain, pipeline, replicas


@pytest.mark.parametrize(
    ("case", "over"),
    [*((case, "pipeline") for case in EXACT), *((case, "replicas") for case in OVER_REPLICAS)],
)
def test_it_trains_as_in_one_process(case, over, found):
    """Bug: means by weights and by masks were means of means, sums were divided by the microbatches."""
    plain, *ranks = found
    history, evaluated, weights = plain[case]
    for rank in ranks[over == "replicas"]:
        assert not isinstance(rank[case], str), rank[case]
        mine, mine_evaluated, mine_weights = rank[case]
        for one, wanted in zip(mine_weights, weights, strict=True):
            np.testing.assert_allclose(one, wanted, rtol=1e-7, atol=1e-9)
        if over == "pipeline":
            assert {name: mine[name] for name in history} == {
                name: pytest.approx(values, rel=1e-6) for name, values in history.items()
            }
            assert mine_evaluated == pytest.approx(evaluated, rel=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_it_is_refused_with_the_line(case, found):
    """Bug: it was computed for each microbatch, and no word was said."""
    for rank in found[1]:
        assert isinstance(rank[case], str)
        assert re.search(REFUSED[case][1], rank[case])
        assert "microbatches to 1" in rank[case]

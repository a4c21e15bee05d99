"""A ``train_step`` that goes on after an update trains on replicas as in one process: GANs, averages."""

import functools
import os

import numpy as np
import pytest

from choices import thorough
from shardwright.testing import run_ranks

SETTINGS = {"pipeline_parallel_degree": 1, "profile": "estimated", "run_dir": "off", "report": False}
NUM_SAMPLES, BATCH = 20, 8
BATCHES = [range(at, min(at + BATCH, NUM_SAMPLES)) for at in range(0, NUM_SAMPLES, BATCH)]


def _data():
    random = np.random.RandomState(0)
    return random.randn(NUM_SAMPLES, 6), random.randn(NUM_SAMPLES, 3)


def _gan(tf, discriminate):
    """Two parts, each with an optimizer, in the order of the examples of Keras."""

    class Gan(tf.keras.Model):
        def __init__(self, discriminator, generator):
            super().__init__()
            self.discriminator, self.generator = discriminator, generator
            self.mean = tf.keras.metrics.Mean(name="g_loss")

        def compile(self, d_optimizer, g_optimizer):
            super().compile()
            self.d_optimizer, self.g_optimizer = d_optimizer, g_optimizer

        @property
        def metrics(self):
            return [self.mean]

        def update(self, tape, loss, part, optimizer):
            gradients = tape.gradient(loss, part.trainable_variables)
            optimizer.apply_gradients(zip(gradients, part.trainable_variables, strict=True))

        def train_step(self, data):
            real, noise = data[:2]
            discriminate(tf, self, real, noise)
            with tf.GradientTape() as tape:
                loss = _bce(tf, 0.0, self.discriminator(self.generator(noise, training=True)))
            self.update(tape, loss, self.generator, self.g_optimizer)
            self.mean.update_state(loss)
            return {"g_loss": self.mean.result()}

    return Gan


def _bce(tf, label, logits):
    labels = tf.fill([tf.shape(logits)[0], 1], tf.cast(label, "float64"))
    return tf.keras.losses.BinaryCrossentropy(from_logits=True)(labels, logits)


def _of_both(tf, gan, real, noise):
    both = tf.concat([gan.generator(noise), real], 0)
    ones = tf.ones([tf.shape(real)[0], 1], "float64")
    with tf.GradientTape() as tape:
        loss_of = tf.keras.losses.BinaryCrossentropy(from_logits=True)
        loss = loss_of(tf.concat([ones, 0.0 * ones], 0), gan.discriminator(both))
    gan.update(tape, loss, gan.discriminator, gan.d_optimizer)


def _with_penalty(tf, gan, real, noise):
    """Two updates of the discriminator, each with a penalty on its gradient."""
    for _ in range(2):
        with tf.GradientTape() as tape:
            between = 0.5 * (real + gan.generator(noise, training=True))
            with tf.GradientTape() as inner:
                inner.watch(between)
                told = gan.discriminator(between, training=True)
            norms = tf.sqrt(tf.reduce_sum(inner.gradient(told, between) ** 2, 1))
            loss = tf.reduce_mean((norms - 1.0) ** 2) - tf.reduce_mean(gan.discriminator(real))
        gan.update(tape, loss, gan.discriminator, gan.d_optimizer)


def _clipped_weights(tf, gan, real, noise):
    _of_both(tf, gan, real, noise)
    for weight in gan.discriminator.trainable_variables:
        weight.assign(tf.clip_by_value(weight, -0.3, 0.3))


def _fitted(discriminate, settings):
    """History and weights after three epochs."""
    import tensorflow as tf

    rank, ranks = 0, 1
    if settings is not None:
        import shardwright.tensorflow as sw

        sw.init({**SETTINGS, **settings})
        rank, ranks = sw.dp_rank(), sw.dp_size()
    keras, layers = tf.keras, tf.keras.layers
    keras.backend.set_floatx("float64")
    keras.utils.set_random_seed(1)
    hidden = [layers.Dense(8, activation="tanh") for _ in range(2)]
    discriminator = keras.Sequential([keras.Input((6,)), hidden[0], layers.Dense(1)])
    generator = keras.Sequential([keras.Input((3,)), hidden[1], layers.Dense(6)])
    model = _gan(tf, discriminate)(discriminator, generator)
    if settings is not None:
        model = sw.DistributedModel(model)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, global_clipnorm=0.1))
    data = [tuple(np.array_split(x[rows], ranks)[rank] for x in _data()) for rows in BATCHES]
    signature = (tf.TensorSpec((None, 6), "float64"), tf.TensorSpec((None, 3), "float64"))
    batches = tf.data.Dataset.from_generator(lambda: iter(data), output_signature=signature)
    batches = batches.apply(tf.data.experimental.assert_cardinality(len(data)))
    try:
        history = model.fit(batches, epochs=3, verbose=0, shuffle=False).history
        return history["g_loss"], [np.asarray(each) for each in model.trainable_variables]
    except Exception as error:
        return str(error)
    finally:
        if settings is not None:
            sw.shutdown()


STEPS = (_of_both, _with_penalty, _clipped_weights)
REFUSED = {"pipeline_parallel_degree": 2}, {"microbatches": 2}


def _each(settings, refused=()):
    trained = [_fitted(discriminate, settings) for discriminate in STEPS]
    return trained, [_fitted(_of_both, each) for each in refused]


@functools.cache
def _alone(*, legacy):
    ((trained, _),) = run_ranks(_each, 1, None, env=_env(legacy), timeout_s=120)
    return trained


@functools.cache
def _on_replicas(*, legacy, divided):
    settings = {"shard_optimizer_state": divided}
    return run_ranks(_each, 2, settings, REFUSED, env=_env(legacy), timeout_s=120)


def _env(legacy):
    return {"TF_USE_LEGACY_KERAS": "1"} if legacy else {}


@pytest.mark.parametrize("legacy", [False, thorough(True)], ids=["keras3", "legacy"])
@pytest.mark.parametrize("divided", [False, thorough(True)], ids=["whole", "divided"])
def test_replicas_train_gans_as_one_process_does(legacy, divided):
    for trained, _ in _on_replicas(legacy=legacy, divided=divided):
        for (losses, weights), (expected, wanted) in zip(trained, _alone(legacy=legacy), strict=True):
            assert losses == pytest.approx(expected, abs=1e-12)
            for got, want in zip(weights, wanted, strict=True):
                np.testing.assert_allclose(got, want, atol=1e-12)


def test_where_updates_cannot_be_made_at_once_the_settings_that_can_are_named():
    for _, told in _on_replicas(legacy=False, divided=False):
        for said in told:
            assert f"{os.path.basename(__file__)}:" in said
            assert 'sw.init({"pipeline_parallel_degree": 1, "microbatches": 1})' in said


def _of_small_batches(tf, gan, real, noise):
    if real.shape[0] < BATCH:
        _of_both(tf, gan, real, noise)


def test_one_that_goes_on_in_a_later_batch_alone_is_refused():
    """It would have used values from before the update, without a word."""
    (told,) = run_ranks(_fitted, 1, _of_small_batches, {"microbatches": 1}, env=_env(False), timeout_s=120)
    assert "after an optimizer was given its gradient" in told

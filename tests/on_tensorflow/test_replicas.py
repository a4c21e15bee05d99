"""Replicas with batches of their own train the model that one process trains with all batches."""

import functools

import numpy as np
import pytest
from keras_features import SETTINGS

from choices import thorough
from shardwright.testing import run_ranks

# Samples of each replica, step by step. One sample is one microbatch, where others are two.
SIZES = [(8, 8), (8, 6), (7, 1)]
REPLICAS = 2


def _batch(step, replica):
    random = np.random.RandomState(10 * step + replica)
    size = SIZES[step][replica]
    return random.randint(0, 20, (size, 6)), random.randint(0, 10, size)


def _made(tf, seed):
    layers = tf.keras.layers
    tf.keras.utils.set_random_seed(seed)
    model = tf.keras.Sequential(
        [
            layers.Embedding(20, 8),
            layers.Flatten(),
            layers.Dense(16, use_bias=False),  # its gradient would be rounding noise, which Adam makes large
            layers.BatchNormalization(),
            layers.Dense(16, activation="tanh"),
            layers.Dense(10),
        ]
    )
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return model, loss_of, tf.keras.optimizers.Adam(0.01)


def _step(tf, model, loss_of):
    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(ids, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    return step


def _plain():
    """The trained weights of one process, by the mean over replicas of the means over their microbatches."""
    import tensorflow as tf

    model, loss_of, optimizer = _made(tf, 0)
    model(tf.zeros([2, 6], tf.int64))
    step = tf.function(_step(tf, model, loss_of))
    for number in range(len(SIZES)):
        means = []
        for replica in range(REPLICAS):
            ids, labels = _batch(number, replica)
            parts = min(2, len(ids))
            pairs = zip(np.array_split(ids, parts), np.array_split(labels, parts), strict=True)
            each = [step(tf.constant(x), tf.constant(y))[0] for x, y in pairs]
            means.append([sum(map(tf.convert_to_tensor, g)) / parts for g in zip(*each, strict=True)])
        total = [sum(g) / REPLICAS for g in zip(*means, strict=True)]
        optimizer.apply_gradients(zip(total, model.trainable_variables, strict=True))
    return [np.asarray(v) for v in model.trainable_variables]


def _horovod():
    from smdistributed import horovod

    horovod.provide()
    import horovod.tensorflow as hvd

    hvd.init()
    return hvd


def _replicated(pipeline, folder, in_function, settings):
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({"pipeline_parallel_degree": pipeline, **SETTINGS, "microbatches": 2, **settings})
    model, loss_of, optimizer = _made(tf, sw.dp_rank())
    model = sw.DistributedModel(model)
    model(tf.zeros([2, 6], tf.int64))
    step = sw.step(_step(tf, model, loss_of))
    over_replicas = _horovod().allreduce if settings.get("horovod") else lambda mean: mean

    def train(ids, labels):
        gradients, loss = step(ids, labels)
        means = [over_replicas(each.accumulate()) for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    if in_function:
        train = tf.function(train)
    losses = [float(train(*map(tf.constant, _batch(n, sw.dp_rank())))) for n in range(len(SIZES))]
    weights = model.get_weights()
    places = {id(variable): place for place, variable in enumerate(model.variables)}
    positions = [places[id(variable)] for variable in model.trainable_variables]
    manager = sw.CheckpointManager(tf.train.Checkpoint(model=model, optimizer=optimizer), folder)
    manager.save()
    slots = [np.asarray(each) for each in optimizer.variables]
    for each in (*model.variables, *optimizer.variables):
        each.assign(tf.zeros(each.shape, each.dtype))
    manager.restore()
    restored = model.get_weights()
    for before, after in zip(slots, optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(after), before)
    replica, num_slots = sw.dp_rank(), sum(each.size for each in slots)
    sw.shutdown()
    return replica, losses, weights, [weights[p] for p in positions], restored, num_slots


@functools.cache
def _trained_by_one_process():
    return run_ranks(_plain, 1, timeout_s=60)[0]


# Name of the settings -> settings.
# A script for Horovod averages once more what is alike on all replicas.
SETTINGS_OF = {"whole": {"horovod": True}, "shared_slots": {"shard_optimizer_state": True}}


def _each(pipeline, folder):
    return {
        name: _replicated(pipeline, f"{folder}/{name}", pipeline == 2, settings)
        for name, settings in SETTINGS_OF.items()
    }


@functools.cache
def _replicas(pipeline, folder):
    return run_ranks(_each, REPLICAS * pipeline, pipeline, folder, timeout_s=150)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("replicas"))


@pytest.mark.parametrize("name", SETTINGS_OF)
@pytest.mark.parametrize("pipeline", [1, thorough(2)], ids=["1x2", "2x2"])
def test_replicas_train_what_one_process_trains(pipeline, name, folder):
    expected = _trained_by_one_process()
    is_shared = name == "shared_slots"
    ranks = [rank[name] for rank in _replicas(pipeline, f"{folder}/{pipeline}")]
    num_slots = sum(2 * each.size for each in expected)  # Adam has two for each variable, and two numbers
    of_all = sum(rank[-1] - 2 for rank in ranks)
    assert of_all == (num_slots if is_shared else REPLICAS * num_slots)
    for replica, losses, weights, trained, restored, own_slots in ranks:
        if is_shared and pipeline == 1:
            assert own_slots <= 0.6 * num_slots
        assert losses == next(other[1] for other in ranks if other[0] == replica)
        for mine, first, again in zip(weights, ranks[0][2], restored, strict=True):
            np.testing.assert_array_equal(mine, first)  # running statistics, too
            np.testing.assert_array_equal(again, mine)
        for mine, wanted in zip(trained, expected, strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=2e-6)
    assert len({tuple(rank[1]) for rank in ranks}) == REPLICAS

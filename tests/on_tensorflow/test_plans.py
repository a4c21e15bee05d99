"""Placement by hand, plan files, and steps that a ``tf.function`` traces before it knows the batch."""

import os

import pytest
from keras_features import SETTINGS, data

from shardwright.testing import run_ranks

DEGREE = {"pipeline_parallel_degree": 2}


def _step(tf, sw, model):
    model(tf.zeros([2, 12]))
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @sw.step
    def step(x, y):
        with tf.GradientTape() as tape:
            outputs = model(x, training=True)
            loss = loss_of(y, outputs)
        return tape.gradient(loss, model.trainable_variables), loss, outputs

    return step


def _here(model):
    """Positions of the variables that this rank holds."""
    found = []
    for position, variable in enumerate(model.variables):
        try:
            variable.numpy()
        except Exception:
            continue
        found.append(position)
    return found


def _by_hand(folder):
    import tensorflow as tf

    import shardwright.tensorflow as sw
    from shardwright.plan import Plan
    from shardwright.run.context import context

    L = tf.keras.layers
    placed = []
    sw.init({**DEGREE, **SETTINGS, "auto_partition": False, "default_partition": 1})
    tf.keras.utils.set_random_seed(3)
    with sw.partition(0):
        first = L.Dense(4, name="a")
    layers = [first, L.Dense(4, name="b"), L.Dense(10, name="c")]
    model = sw.DistributedModel(tf.keras.Sequential(layers, name="net"))
    step = _step(tf, sw, model)
    losses = [step(*data(16))[1].reduce_mean().numpy()]
    placed.append(_here(model))
    path = os.path.join(folder, "plan.json")
    plan = context().plan
    if sw.rank() == 0:
        plan.write(path)
    sw.barrier()
    again = Plan.read(path)
    sw.shutdown()

    sw.init(path)
    tf.keras.utils.set_random_seed(3)
    layers = [L.Dense(4, name="a"), L.Dense(4, name="b"), L.Dense(10, name="c")]
    model = sw.DistributedModel(tf.keras.Sequential(layers, name="net"))
    step = _step(tf, sw, model)
    losses.append(step(*data(16))[1].reduce_mean().numpy())
    placed.append(_here(model))
    sw.shutdown()
    return placed, losses, again == plan


def _batches_of_unknown_size():
    import tensorflow as tf

    import shardwright.tensorflow as sw

    L = tf.keras.layers
    sw.init({**DEGREE, **SETTINGS})
    tf.keras.utils.set_random_seed(3)
    step = _step(tf, sw, sw.DistributedModel(tf.keras.Sequential([L.Dense(4), L.Dense(10)])))

    def train(x, y):
        gradients, loss, outputs = step(x, y)
        sums = [gradient.reduce_sum() for gradient in gradients]
        return [each for each in sums if each is not None], loss.stack(), outputs.merge()

    signature = [tf.TensorSpec([None, 12]), tf.TensorSpec([None], tf.int64)]
    traced = tf.function(train, input_signature=signature)
    found = []
    with pytest.warns(UserWarning, match="without knowing the number of samples"):
        traced(*data(16))
    for size in (16, 14):
        mine, wanted = traced(*data(size)), train(*map(tf.constant, data(size)))
        flat = zip(tf.nest.flatten(mine), tf.nest.flatten(wanted), strict=True)
        found.append((mine[2].shape[0], len(mine[0]), all(bool(tf.reduce_all(a == b)) for a, b in flat)))
    try:
        traced(*data(3))
    except Exception as error:
        found.append(str(error))
    sw.shutdown()
    return found


def _both(folder):
    return _by_hand(folder), _batches_of_unknown_size()


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What both scripts tell on each of two ranks."""
    return run_ranks(_both, 2, str(tmp_path_factory.mktemp("plan")), timeout_s=100)


def test_layers_go_where_the_user_or_a_plan_file_puts_them(found):
    ranks = [by_hand for by_hand, _ in found]
    for (placed, losses, same), wanted in zip(ranks, ([0, 1], [2, 3, 4, 5]), strict=True):
        assert placed == [wanted, wanted]
        assert losses[0] == losses[1]
        assert same


def test_a_function_that_does_not_know_the_batch(found):
    for _, rank in found:
        assert rank[:2] == [(16, 2, True), (14, 2, True)]
        assert "a batch of 3 samples" in rank[2]
        assert "traced for 4 microbatches" in rank[2]

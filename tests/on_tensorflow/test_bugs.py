"""Every fault that was found in what two ranks give."""

import functools
import gc

import pytest

from shardwright.tensorflow.optimizer import has_nothing_here
from shardwright.testing import run_ranks

SETTINGS = {"pipeline_parallel_degree": 2, "microbatches": 2, "profile": "estimated", "run_dir": "off"}


def _start():
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({**SETTINGS, "report": False})
    layers = [tf.keras.layers.Dense(8) for _ in range(3)]
    model = sw.DistributedModel(tf.keras.Sequential(layers))
    model(tf.zeros([2, 8]))
    return tf, sw, model


def _steps_made_in_a_loop():
    tf, sw, model = _start()

    def made(number):
        @sw.step
        def step(x):
            return tf.reduce_mean(model(x)) * 0.0 + number

        return step

    found = []
    for number in range(5):
        found.append(float(made(number)(tf.ones([4, 8])).reduce_mean()))
        gc.collect()
    sw.shutdown()
    return found


def test_a_step_function_has_a_trace_of_its_own():
    """Bug: one that was made where another had been ran the trace of that one."""
    for steps, _, _ in _found(legacy=False):
        assert steps == [0.0, 1.0, 2.0, 3.0, 4.0]


def _norms():
    tf, sw, model = _start()

    @sw.step
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    gradients = [each.accumulate() for each in step(tf.ones([4, 8]))]
    head = [each for each, variable in zip(gradients, model.trainable_variables, strict=True)][-2:]
    everywhere = tf.constant([3.0, 4.0])
    (clipped,), norm = tf.clip_by_global_norm([everywhere], 5.0)
    found = [float(norm), float(tf.norm(clipped)), float(tf.linalg.global_norm(head))]
    local = [float(tf.norm(each)) for each in head if each is not None]
    sw.shutdown()
    return found, local


def _clipped_without_variables():
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({**SETTINGS, "report": False, "auto_partition": False, "default_partition": 0})
    tf.keras.utils.set_random_seed(1)
    L = tf.keras.layers
    with sw.partition(1):
        last = L.Activation("tanh")
    model = sw.DistributedModel(tf.keras.Sequential([L.Dense(8), last]))
    model(tf.zeros([2, 8]))
    optimizer = tf.keras.optimizers.SGD(1.0, global_clipnorm=0.5)

    @sw.step
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    @tf.function
    def train(x):
        means = [each.accumulate() for each in step(x)]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))

    before = [each.copy() for each in model.get_weights()]
    train(tf.ones([4, 8]))
    moved = [after - each for after, each in zip(model.get_weights(), before, strict=True)]
    sw.shutdown()
    return sum(float((each**2).sum()) for each in moved) ** 0.5


def _each(legacy):
    if legacy:
        return None, None, _clipped_without_variables()
    return _steps_made_in_a_loop(), _norms(), _clipped_without_variables()


@functools.cache
def _found(*, legacy):
    """What all of them give on two ranks, in one job."""
    env = {"TF_USE_LEGACY_KERAS": "1"} if legacy else {}
    return run_ranks(_each, 2, legacy, env=env, timeout_s=60)


@pytest.mark.parametrize("legacy", [False, True], ids=["keras3", "legacy"])
def test_a_rank_without_variables_takes_part_in_a_global_norm(legacy):
    """Bug: the other ranks waited for it."""
    for _, _, norm in _found(legacy=legacy):
        assert norm == pytest.approx(0.5, rel=1e-5)


def test_a_norm_of_what_all_ranks_have_is_not_summed_over_them():
    """Bug: the norm of (3, 4) was 7.07 on two ranks."""
    outcomes = [norms for _, norms, _ in _found(legacy=False)]
    (local,) = (local for _, local in outcomes if local)
    expected = sum(each**2 for each in local) ** 0.5
    for (norm, clipped, of_head), _ in outcomes:
        assert norm == pytest.approx(5.0)
        assert clipped == pytest.approx(5.0)
        assert of_head == pytest.approx(expected)


def test_a_rank_whose_gradients_are_all_none_leaves_the_update_to_others():
    """Bug: Keras refused an update without gradients, and the other ranks waited."""
    unused, elsewhere = (None, "unused"), (1.0, "elsewhere")
    assert has_nothing_here([unused, elsewhere], [unused])
    assert not has_nothing_here([unused], [unused])  # it is Keras' to refuse
    assert not has_nothing_here([unused, elsewhere], [elsewhere])

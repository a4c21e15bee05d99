"""Every fault that was found in what two ranks give."""

import functools
import gc

import numpy as np
import pytest

from choices import thorough
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
    for *_, steps, _ in _found(legacy=False):
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


def _metric_of_a_penalty():
    """What two batches give a metric, and their losses."""
    tf, sw, model = _start()
    total = tf.keras.metrics.Sum()

    @sw.step
    def step(x):
        with tf.GradientTape() as tape:
            with tf.GradientTape() as inner:
                inner.watch(x)
                y = model(x)
            loss = tf.reduce_mean(inner.gradient(y, x) ** 2)
        total.update_state(loss)
        return tape.gradient(loss, model.trainable_variables)[0], loss

    x = tf.random.stateless_uniform([8, 8], (1, 2))
    losses = [float(step(x)[1].reduce_sum()) for _ in range(2)]
    sw.shutdown()
    return float(total.result()), sum(losses)


class _Steps:
    """Models with a step of their own, as the pages of Keras have them."""

    @staticmethod
    def metrics_by_name(tf):
        class Model(tf.keras.Sequential):
            def train_step(self, data):
                x, y = data
                with tf.GradientTape() as tape:
                    loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
                gradients = tape.gradient(loss, self.trainable_variables)
                self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
                for metric in self.metrics:
                    metric.update_state(loss) if metric.name == "loss" else metric.update_state(y, y)
                return {metric.name: metric.result() for metric in self.metrics}

        return Model

    @staticmethod
    def one_part_first(tf):
        class Model(tf.keras.Sequential):
            def train_step(self, data):
                x, _ = data
                for layer in self.layers:
                    with tf.GradientTape() as tape:
                        loss = tf.reduce_mean(self(x, training=True) ** 2)
                    gradients = tape.gradient(loss, layer.trainable_variables)
                    self.optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
                return {"loss": loss}

        return Model

    @staticmethod
    def read_in_a_branch(tf):
        def use(x, w):
            return tf.cond(tf.reduce_any(x > 0), lambda: tf.norm(w * 1.0), lambda: 0.0)

        return _used_after(tf, use)

    @staticmethod
    def assigned(tf):
        def use(x, w):
            w.assign(tf.ones([4, 4]))
            return tf.norm(x)

        return _used_after(tf, use)


def _used_after(tf, use):
    """A model that gives its optimizer the gradients, and goes on with the weights of its last layer."""

    class Model(tf.keras.Sequential):
        def train_step(self, data):
            x, _ = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self(x, training=True) ** 2)
            variables = self.trainable_variables
            self.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
            return {"loss": loss, "used": use(x, self.layers[-1].kernel)}

    return Model


def _fitted(name):
    """What ``fit`` tells, or its error."""
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({**SETTINGS, "report": False})
    own = getattr(_Steps, name)(tf)
    model = sw.DistributedModel(own([tf.keras.Input((4,)), *(tf.keras.layers.Dense(4) for _ in range(2))]))
    model.compile("sgd", "mse", metrics=["mae"])
    x = np.ones([4, 4], "f")
    try:
        return model.fit(x, x, batch_size=4, verbose=0).history
    except Exception as error:
        return str(error)
    finally:
        sw.shutdown()


def _each(legacy):
    both = _clipped_without_variables(), _metric_of_a_penalty(), *map(_fitted, _OWN_STEPS)
    return both if legacy else (*both, _steps_made_in_a_loop(), _norms())


_OWN_STEPS = ("metrics_by_name", "one_part_first", "read_in_a_branch", "assigned")


@functools.cache
def _found(*, legacy):
    """What all of them give on two ranks, in one job."""
    env = {"TF_USE_LEGACY_KERAS": "1"} if legacy else {}
    return run_ranks(_each, 2, legacy, env=env, timeout_s=60)


@pytest.mark.parametrize("legacy", [False, thorough(True)], ids=["keras3", "legacy"])
def test_a_rank_without_variables_takes_part_in_a_global_norm(legacy):
    """Bug: the other ranks waited for it."""
    for norm, *_ in _found(legacy=legacy):
        assert norm == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("legacy", [False, thorough(True)], ids=["keras3", "legacy"])
def test_a_metric_of_gradients_counts_every_microbatch(legacy):
    """Bug: later microbatches read its value before earlier ones had changed it, and undid the changes."""
    for _, (total, losses), *_ in _found(legacy=legacy):
        assert total == pytest.approx(losses, rel=1e-5)


def test_a_step_tells_all_metrics_by_name():
    """Bug: with Keras 3 the compiled ones are one metric, whose result is a dictionary, and it failed."""
    for _, _, history, *_ in _found(legacy=False):
        assert history["mae"] == [0.0]
        assert history["loss"][0] > 0.0


@pytest.mark.parametrize("legacy", [False, thorough(True)], ids=["keras3", "legacy"])
def test_a_step_that_goes_on_after_an_update_is_refused(legacy):
    """Bug: it went on with the values from before; in one process it has the new ones."""
    for _, _, _, *told in _found(legacy=legacy):
        for said in told[:3]:
            assert "after an optimizer was given its gradient" in said
            assert "test_bugs.py:" in said
            assert "take all gradients first" in said


def test_a_norm_of_what_all_ranks_have_is_not_summed_over_them():
    """Bug: the norm of (3, 4) was 7.07 on two ranks."""
    outcomes = [norms for *_, norms in _found(legacy=False)]
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

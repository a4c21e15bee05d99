"""``compile``, ``fit``, ``evaluate`` and ``predict`` over two ranks give what they give in one process."""

import os
import warnings

import numpy as np
import pytest
from keras_features import SETTINGS

from choices import thorough
from shardwright.errors import UsageError
from shardwright.observe.metrics import read_json_lines
from shardwright.observe.report.data import gather
from shardwright.observe.report.measured import WORK
from shardwright.tensorflow.fit import logs_of
from shardwright.tensorflow.outputs import StepOutput
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
    given = keras.Input((6,))
    hidden = layers.Dense(8)(layers.Dense(16, activation="relu")(given))
    model = keras.Model(given, layers.Dense(3, name="classes")(hidden))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01, global_clipnorm=1.0), {"classes": loss}, metrics=["accuracy"])
    if ranks:
        assert sw.DistributedModel(model) is model
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
    # Three batches in two calls.
    average = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.5)
    model.compile(average, loss, metrics=["accuracy"], steps_per_execution=2)
    ends = []
    counts = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: ends.append(batch))
    table = keras.callbacks.CSVLogger(f"{folder}/epochs.csv", append=True)
    board = keras.callbacks.TensorBoard(f"{folder}/board", histogram_freq=1)
    found["again"] = model.fit(x, y, callbacks=[counts, table, board], **options).history
    found["ends"] = ends
    found["predicted again"] = model.predict(x, batch_size=8, verbose=0)
    found["evaluated again"] = model.evaluate(x, y, batch_size=8, verbose=0, return_dict=True)
    found["weights"] = model.get_weights()
    model.save_weights(f"{folder}/then.weights.h5")
    model.fit(x, y, **options)
    model.load_weights(f"{folder}/then.weights.h5")
    found["from there"] = model.fit(x, y, epochs=2, **options).history
    model.save(f"{folder}/whole.keras")
    if ranks:
        sw.shutdown()
    if not ranks or os.environ["RANK"] == "0":
        again = keras.models.load_model(f"{folder}/whole.keras")
        found["goes on"] = again.fit(x, y, **options).history
    return found


class _WithStep:
    """A model with a step of its own, two optimizers, and a metric of its own."""

    def __new__(cls, tf):
        class Model(tf.keras.Model):
            def __init__(self):
                super().__init__()
                self.first, self.last = tf.keras.layers.Dense(8), tf.keras.layers.Dense(3)
                self.optimizer_of_last = tf.keras.optimizers.SGD(0.3)
                self.mean = tf.keras.metrics.Mean()

            @property
            def metrics(self):
                return [self.mean]

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
                self.mean.update_state(loss)
                return {"error": loss, self.mean.name: self.mean.result(), "of epoch": self.mean.result()}

        return Model()


def _own_step(ranks, folder):
    import tensorflow as tf

    tf.keras.utils.set_random_seed(4)
    model = _WithStep(tf)
    if ranks:
        import shardwright.tensorflow as sw

        sw.init({"pipeline_parallel_degree": ranks, **SETTINGS, "run_dir": f"{folder}/runs"})
        model = sw.DistributedModel(model)
    model.compile(optimizer="sgd")
    x, _ = _data(24)
    history = model.fit(x, x[:, :3], batch_size=8, epochs=2, shuffle=False, verbose=0).history
    model.predict(x, batch_size=8, verbose=0)  # no step of the training
    if ranks:
        sw.shutdown()
    return history


def _backed_up(ranks, folder, *, stops):
    """The losses of a ``fit`` that stops in its middle, or goes on there; its error where it is refused."""
    import tensorflow as tf

    keras = tf.keras
    keras.utils.set_random_seed(4)
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(3)])
    if ranks:
        import shardwright.tensorflow as sw

        sw.init({"pipeline_parallel_degree": ranks, **SETTINGS})
        model = sw.DistributedModel(model)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    x, _ = _data(16)

    def stop(epoch, logs):
        if stops and epoch == 2:
            raise KeyError("stopped")

    callbacks = [
        keras.callbacks.LambdaCallback(on_epoch_begin=stop),
        keras.callbacks.BackupAndRestore(f"{folder}/backup"),
    ]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    try:
        return model.fit(x, x[:, :3], epochs=4, callbacks=callbacks, **options).history["loss"]
    except (KeyError, UsageError) as error:
        return str(error)
    finally:
        if ranks:
            sw.shutdown()


def _in_half_precision(ranks, initial_scale, largest):
    """Losses, the scale after each batch, updates, and whether the weights have moved by then."""
    import tensorflow as tf

    keras, layers = tf.keras, tf.keras.layers
    if ranks:
        import shardwright.tensorflow as sw

        sw.init({"pipeline_parallel_degree": ranks, **SETTINGS})
    keras.utils.set_random_seed(4)
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        model = keras.Sequential(
            [layers.Dense(16, activation="tanh"), layers.Dense(8), layers.Dense(3, dtype="float32")]
        )
        if ranks:
            model = sw.DistributedModel(model)
        optimizer = keras.mixed_precision.LossScaleOptimizer(
            keras.optimizers.SGD(0.1), initial_scale=initial_scale, dynamic_growth_steps=4
        )
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = _data(24)
        scales, moved = [], []
        before = []

        def note(batch, logs):
            scale = getattr(optimizer, "dynamic_scale", None)
            scales.append(float(optimizer.loss_scale if scale is None else scale))
            weights = model.get_weights()
            before.append(weights)
            moved.append([not np.array_equal(*each) for each in zip(weights, before[0], strict=True)])

        history = model.fit(
            x * largest,
            y,
            batch_size=8,
            epochs=5,
            shuffle=False,
            verbose=0,
            callbacks=[keras.callbacks.LambdaCallback(on_train_batch_end=note)],
        ).history
    finally:
        keras.mixed_precision.set_global_policy("float32")
    if ranks:
        sw.shutdown()
    return history["loss"], scales, [all(each) for each in moved], int(optimizer.iterations)


def _both(ranks, folder):
    return (
        _fitted(ranks, folder),
        _own_step(ranks, folder),
        _in_half_precision(ranks, 2.0**10, 1.0),
        _in_half_precision(ranks, 2.0**17, 1000.0),
        [_backed_up(ranks, folder, stops=stops) for stops in (True, False)],
    )


@pytest.fixture(scope="module", params=[False, thorough(True)], ids=["keras3", "legacy"])
def found(request, tmp_path_factory):
    """What both scripts tell: in one process, and on each of two ranks."""
    folder = tmp_path_factory.mktemp("best")
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **({"TF_USE_LEGACY_KERAS": "1"} if request.param else {})}
    (expected,) = run_ranks(_both, 1, 0, str(folder / "plain"), env=env, timeout_s=240)
    ranks = run_ranks(_both, 2, 2, str(folder), env=env, timeout_s=240)
    assert os.path.exists(folder / "best.weights.h5")
    assert len((folder / "epochs.csv").read_text().splitlines()) == 2  # of the first rank alone
    assert len(list((folder / "board").rglob("*tfevents*"))) == 1
    return expected, ranks, next((folder / "runs").iterdir())


def test_fit_over_two_ranks_is_fit(found):
    (expected, *_), ranks, _ = found
    assert ranks[0][0]["goes on"]["loss"] == pytest.approx(expected["goes on"]["loss"], rel=1e-5)
    for rank, *_ in ranks:
        for name in ("history", "again", "from there"):
            assert rank[name].keys() == expected[name].keys()
            for key, values in expected[name].items():
                assert rank[name][key] == pytest.approx(values, rel=1e-5)
        assert rank["ends"] == expected["ends"]
        for name in ("evaluated", "evaluated again"):
            assert rank[name] == pytest.approx(expected[name], rel=1e-5)
        for name in ("predicted", "predicted again"):
            np.testing.assert_allclose(rank[name], expected[name], rtol=0, atol=1e-5)
        for mine, wanted in zip(rank["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5)


def test_a_train_step_of_the_users_own(found):
    (_, expected, *_), ranks, _ = found
    for _, history, *_ in ranks:
        for name in ("error", "mean", "of epoch"):
            assert history[name] == pytest.approx(expected[name], rel=1e-5)


def test_the_run_folder_has_every_training_step_and_the_actions_of_one(found):
    (_, expected, *_), _, folder = found
    data = gather(folder)
    assert [step.step for step in data.steps] == [1, 2, 3, 4, 5, 6]
    losses = [step["train/loss"] for step in read_json_lines(folder / "metrics.jsonl")]
    # What fit tells are those of the last step of each epoch.
    assert losses[2::3] == pytest.approx(expected["error"], rel=1e-5)
    (timeline,) = data.recorded
    assert timeline.step == 3
    names = {(span.rank, span.name) for span in timeline.spans if span.kind in WORK}
    assert names == {(rank, f"{rank}{kind}{m}") for rank in range(2) for kind in "FB" for m in range(4)}
    step_time = next(row for row in data.compared if row.name.startswith("step time"))
    assert step_time.above is not None
    assert data.facts.model == "Model"


def test_a_loss_scale_grows_as_in_one_process(found):
    (_, _, (losses, scales, _, updates), *_), ranks, _ = found
    assert max(scales) > 2.0**10
    for _, _, (mine, my_scales, _, my_updates), *_ in ranks:
        assert mine == pytest.approx(losses, rel=2e-2)
        assert (my_scales, my_updates) == (scales, updates)


def test_all_ranks_leave_out_a_step_whose_gradients_are_infinite_on_one(found):
    """Gradients of the first layer alone, on the first rank, are too large for 16 bits."""
    _, ranks, _ = found
    losses, scales, moved, _ = ranks[0][3]
    assert all(rank[3] == ranks[0][3] for rank in ranks)
    assert scales[0] == 2.0**16
    assert min(scales) < scales[0]
    assert not moved[1]  # the second rank's have not moved either
    assert moved[-1]
    assert np.isfinite(losses).all()


def test_a_fit_that_was_interrupted_goes_on_or_is_refused(found):
    """Legacy Keras has each rank write what it holds into one folder."""
    (*_, (_, expected)), ranks, _ = found
    for *_, (first, told) in ranks:
        if isinstance(told, str):
            assert "BackupAndRestore of legacy Keras" in told
            assert "sw.CheckpointManager" in told
        else:
            assert "stopped" in first
            assert told == pytest.approx(expected, rel=1e-5)
    assert isinstance(ranks[0][-1][1], str) == ("legacy" in os.environ["PYTEST_CURRENT_TEST"])


def test_what_a_step_tells_of_an_uneven_batch_is_a_mean_over_samples():
    """Bug: the smaller microbatch counted as much as the others."""
    import tensorflow as tf

    told = {"error": StepOutput([tf.constant(1.0), tf.constant(4.0)]), "mean": StepOutput([])}
    found = logs_of(lambda: {"mean": tf.constant(5.0)}, told, 3)
    assert {name: float(value) for name, value in found.items()} == {"error": 2.0, "mean": 5.0}

"""Parts of a model after ``fit``, as examples of Keras end; a ``ModelCheckpoint`` of the first rank."""

import os
import runpy
import sys
import warnings

import numpy as np
import pytest
from keras_features import SETTINGS

from shardwright.errors import UsageError
from shardwright.testing import run_ranks


def _ended(ranks, folder):
    """An autoencoder, and what a script does with its parts."""
    import tensorflow as tf

    keras, layers = tf.keras, tf.keras.layers
    rank = int(os.environ["RANK"])
    # Keras' own, when it looks at numbers.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    if ranks:
        import shardwright.tensorflow as sw

        sw.init({"pipeline_parallel_degree": ranks, **SETTINGS})
    keras.utils.set_random_seed(4)
    encoder = keras.Sequential([keras.Input((8,)), layers.Dense(16, activation="relu"), layers.Dense(2)])
    decoder = keras.Sequential([keras.Input((2,)), layers.Dense(16, activation="relu"), layers.Dense(8)])
    given = keras.Input((8,))
    model = keras.Model(given, decoder(encoder(given)))
    if ranks:
        model = sw.DistributedModel(model)
    model.compile("sgd", "mse")
    x = np.random.RandomState(3).rand(16, 8).astype("float32")
    codes, found = np.ones((2, 2), "float32"), {}
    monitored = []
    callbacks = [
        keras.callbacks.LambdaCallback(
            on_epoch_end=lambda epoch, logs: monitored.append(decoder(codes).numpy())
        )
    ]
    if rank == 0:
        path = f"{folder}/first.weights.h5"
        callbacks.append(
            keras.callbacks.ModelCheckpoint(path, "loss", save_best_only=True, save_weights_only=True)
        )
    model.fit(x, x, batch_size=8, epochs=2, callbacks=callbacks, verbose=0)
    found["monitored"] = np.stack(monitored)
    found["decoder"] = decoder.predict(codes, verbose=0)
    found["decoder again"] = decoder.predict(codes * 2, verbose=0)
    found["encoder"] = encoder(x).numpy()
    found["model"] = model(x).numpy()
    found["weights"] = decoder.layers[-1].get_weights()[0]
    hidden = keras.Model(model.input, encoder.layers[0](model.input))
    found["hidden"] = hidden.predict(x, verbose=0)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    found["clone"] = clone(x).numpy()
    with tf.GradientTape() as tape:
        tape.watch(inputs := tf.constant(x))
        score = encoder(inputs)
    found["saliency"] = tape.gradient(score, inputs).numpy()
    kernel = decoder.layers[0].kernel
    if not ranks:
        return found, "" if ranks else None
    with model.whole():
        np.testing.assert_array_equal(kernel.numpy(), decoder.layers[0].get_weights()[0])
    path = f"{folder}/never.weights.h5"
    best = {"save_best_only": True, "save_weights_only": True, "initial_value_threshold": 1e-9}
    never = [keras.callbacks.ModelCheckpoint(path, "loss", **best)] if rank == 0 else []
    model.fit(x, x, batch_size=8, callbacks=never, verbose=0)
    try:
        message = str([each.numpy() for each in model.variables])
    except UsageError as error:
        message = str(error)
    try:
        alone = [keras.callbacks.ModelCheckpoint(f"{folder}/b.weights.h5", save_weights_only=True)] * rank
        model.fit(x, x, callbacks=alone, verbose=0)
    except UsageError as error:
        message += str(error)
    sw.shutdown()
    return found, message


@pytest.fixture(scope="module", params=[False, True], ids=["keras3", "legacy"])
def found(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("parts")
    env = {"TF_CPP_MIN_LOG_LEVEL": "3", **({"TF_USE_LEGACY_KERAS": "1"} if request.param else {})}
    (folder / "plain").mkdir()
    (plain,) = run_ranks(_ended, 1, 0, str(folder / "plain"), env=env, timeout_s=200)
    return plain, run_ranks(_ended, 2, 2, str(folder), env=env, timeout_s=200), folder


def test_parts_give_what_they_give_in_one_process(found):
    """Bug: each rank read variables of others, and failed."""
    (plain, _), ranks, _ = found
    for rank, _ in ranks:
        assert rank.keys() == plain.keys()
        for name, values in plain.items():
            np.testing.assert_allclose(rank[name], values, rtol=1e-4, atol=1e-5)


def test_a_bare_variable_is_refused_with_what_reads_it(found):
    for _, message in found[1]:
        assert "with model.whole():" in message


def test_a_checkpoint_of_the_first_rank_alone_is_written(found):
    """Bug: the first rank waited for ranks that trained on."""
    assert (found[2] / "first.weights.h5").exists()
    assert all("rank 1 has a ModelCheckpoint that rank 0 does not have" in told for _, told in found[1])


def test_a_checkpoint_of_the_first_rank_knows_what_is_good_enough(found):
    """``initial_value_threshold`` held on the first rank alone: the others would have saved."""
    assert not (found[2] / "never.weights.h5").exists()


def _example(folder):
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    sys.argv = ["keras_fit.py", folder]
    runpy.run_path("examples/keras_fit.py")


def test_the_example_runs(tmp_path):
    settings = '{"run_dir": "off", "profile": "estimated", "report": false}'
    env = {"SHARDWRIGHT_SET": settings, "TF_CPP_MIN_LOG_LEVEL": "3"}
    run_ranks(_example, 2, str(tmp_path), env=env, init_process_group=False, timeout_s=120)
    assert (tmp_path / "rings.keras").exists()

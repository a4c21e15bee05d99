"""Variables that another rank holds: an error says so, and what takes the whole model takes it from all."""

import os
import warnings

import numpy as np
import pytest
from keras_features import SETTINGS, data, layers

from shardwright.testing import run_ranks


def _on_a_rank(folder):
    import tensorflow as tf

    import shardwright.tensorflow as sw

    # Keras' own, when it writes variables.
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    sw.init({"pipeline_parallel_degree": 2, **SETTINGS})
    model = sw.DistributedModel(tf.keras.Sequential(layers(tf)))
    model(tf.zeros([2, 12]))
    before = [each.copy() for each in model.get_weights()]
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @sw.step
    def evaluate(x, y):
        predictions = model(x)
        return loss_of(y, predictions), predictions

    def losses():
        return float(evaluate(*data(16))[0].reduce_mean())

    found = {
        "loss": losses(),
        "before": before,
        "weights": model.get_weights(),
        "count": model.count_params(),
    }
    x = data(16)[0]
    found["outputs"] = evaluate(*data(16))[1].merge().numpy()
    errors = []
    for variable in model.variables:
        try:
            np.asarray(variable)
        except Exception as error:
            errors.append(str(error))
    found["errors"] = errors
    try:
        model(tf.constant(x))
    except Exception as error:
        found["call"] = str(error)
    lines = []
    model.summary(print_fn=lambda line, **_: lines.append(line))
    found["summary"] = "\n".join(lines)
    weights = os.path.join(folder, "all.weights.h5")
    model.save_weights(weights)
    model.save_model(os.path.join(folder, "saved"))
    model.set_weights([np.zeros_like(each) for each in before])
    found["zeros"] = losses()
    model.load_weights(weights)
    found["loaded"] = losses()
    found["again"] = model.get_weights()
    sw.shutdown()
    if os.environ["RANK"] == "0":
        found["saved"] = _saved(folder)
    return found


def _saved(folder):
    """What the files give after the run."""
    import tensorflow as tf

    model = tf.keras.models.load_model if os.environ.get("TF_USE_LEGACY_KERAS") else tf.saved_model.load
    serve = model(os.path.join(folder, "saved")).signatures["serving_default"]
    names = list(serve.structured_input_signature[1])
    return serve(**{names[0]: tf.constant(data(16)[0])})["output_0"].numpy()


@pytest.fixture(scope="module", params=[False, True], ids=["keras3", "legacy"])
def found(request, tmp_path_factory):
    env = {"TF_USE_LEGACY_KERAS": "1"} if request.param else {}
    folder = str(tmp_path_factory.mktemp("model"))
    return run_ranks(_on_a_rank, 2, folder, env=env, timeout_s=120)


def test_reading_one_is_an_error_that_names_it(found):
    first, second = found
    assert len(first["errors"]) + len(second["errors"]) == len(first["weights"])
    assert "has no value on rank 0: rank 1 holds it" in first["errors"][0]
    assert "has no value on rank 1: rank 0 holds it" in second["errors"][0]
    assert "kernel" in second["errors"][0]
    assert "Read it on all ranks under `with model.whole():`" in second["errors"][0]
    for rank in (first, second):
        assert "call" not in rank  # which all ranks make together: see test_parts.py


def test_get_weights_are_those_of_all_ranks(found):
    for rank in found:
        for name in ("weights", "again"):
            for mine, wanted in zip(rank[name], found[0]["before"], strict=True):
                np.testing.assert_array_equal(mine, wanted)


def test_counts_and_summary_are_of_the_whole_model(found):
    for rank in found:
        assert rank["count"] == sum(each.size for each in rank["before"]) == 922
        assert "922" in rank["summary"]


def test_set_and_load_weights_reach_every_rank(found):
    for rank in found:
        assert rank["zeros"] == pytest.approx(np.log(10), rel=1e-6)
        assert rank["loaded"] == rank["loss"] != rank["zeros"]


def test_a_saved_model_gives_the_same_outputs_without_shardwright(found):
    outputs = found[0]["saved"]
    for rank in found:
        np.testing.assert_allclose(outputs, rank["outputs"], rtol=0, atol=1e-6 * np.abs(outputs).max())

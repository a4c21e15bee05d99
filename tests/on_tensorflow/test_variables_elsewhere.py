"""Variables that another rank holds: an error says so, and what takes the whole model takes it from all."""

import os
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
from keras_features import SETTINGS, data, layers

from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from shardwright.tensorflow import whole as whole_module
from shardwright.tensorflow.variables import tf_variable
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


def test_an_optimizer_that_cannot_be_made_again_fails_on_all_ranks(monkeypatch):
    """Bug: the first rank failed, and the others waited for it to write the model."""

    def from_first_rank(make):
        raise UsageError("rank 0 has failed")

    monkeypatch.setattr(whole_module, "_slots_of_all", lambda run, optimizer: {"momentum/kernel": None})
    run = SimpleNamespace(
        mesh=SimpleNamespace(world_size=2),
        is_placed=True,
        keras_model=SimpleNamespace(optimizer=object()),
        rank=1,
        from_first_rank=from_first_rank,
    )
    with pytest.raises(UsageError, match="rank 0 has failed"), whole_module.whole_optimizer(run):
        pass


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras', when it writes
def test_a_rank_that_reads_a_file_makes_no_slots_of_other_ranks(tmp_path):
    """Each had those of the whole model for a moment."""
    import tensorflow as tf

    keras, path = tf.keras, str(tmp_path / "model.weights.h5")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    model.compile(written := keras.optimizers.Adam(0.1, use_ema=True), "mse")
    model.fit(np.ones([2, 4]), np.ones([2, 3]), verbose=0)
    model.save_weights(path)
    here, elsewhere = (layer.trainable_variables for layer in reversed(model.layers))
    model.compile(own := keras.optimizers.Adam(0.5, use_ema=True), "mse")
    own.build(here)
    run = SimpleNamespace(
        mesh=SimpleNamespace(world_size=2),
        variables=SimpleNamespace(is_remote=lambda each: any(each is other for other in elsewhere)),
    )
    with whole_module.optimizer_from_file(run, model):
        whole = model.optimizer
        model.load_weights(path)
    assert model.optimizer is own
    assert int(own.iterations) == 1
    for variable in here:
        slots = _private.slots_of(own, variable)
        assert len(slots) == 3
        for name, slot in _private.slots_of(written, variable).items():
            np.testing.assert_array_equal(slots[name], slot)
    for variable in (*here, *elsewhere):
        for slot in _private.slots_of(whole, variable).values():
            handle = tf_variable(slot).handle
            assert tf.size(tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float32)) == 0

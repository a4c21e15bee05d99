"""``tf.train.Checkpoint`` itself over ranks: each rank has a file of its own, or there is none.

Bug: ranks wrote the variables that they held over those of the others, into one file.
"""

import os

import numpy as np
import pytest
from keras_features import SETTINGS

from shardwright.testing import run_ranks

ONE_PATH = ("save", "write", "manager")


def _said(call):
    """What an error says; "" where there is none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _compiled(keras):
    """Layers of one shape, so that values of one fit another."""
    layers = [keras.layers.Dense(4, name=f"l{number}") for number in range(3)]
    model = keras.Sequential([keras.Input((4,)), *layers], name="net")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def _on_a_rank(folder):
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({"pipeline_parallel_degree": 2, **SETTINGS})
    rank, keras = sw.rank(), tf.keras
    x = np.random.RandomState(1).rand(8, 4).astype("f")
    if rank == 0:  # as a script in one process does
        model = _compiled(keras)
        model.fit(x, x, verbose=0)
        tf.train.Checkpoint(model=model, optimizer=model.optimizer).write(f"{folder}/whole")
    sw.barrier()
    model = sw.DistributedModel(_compiled(keras))

    def checkpoint(**more):
        return tf.train.Checkpoint(model=model, optimizer=model.optimizer, **more)

    def fit():
        model.fit(x, x, batch_size=8, verbose=0)
        return model.get_weights()

    fit()
    found = {
        "save": _said(lambda: checkpoint().save(f"{folder}/one/ckpt")),
        "write": _said(lambda: checkpoint().write(f"{folder}/one/ckpt")),
        "manager": _said(lambda: tf.train.CheckpointManager(checkpoint(), f"{folder}/one", 1).save()),
    }
    found["files"] = os.listdir(folder)
    others = tf.train.Checkpoint(count=tf.Variable(1))
    found["others"] = _said(lambda: rank == 0 and others.save(f"{folder}/others/ckpt"))
    manager = tf.train.CheckpointManager(checkpoint(), f"{folder}/rank-{rank}", 1)
    manager.save()
    expected = fit()
    manager.checkpoint.restore(manager.latest_checkpoint)
    found["goes on"] = [np.abs(mine - wanted).max() for mine, wanted in zip(fit(), expected, strict=True)]
    found["of another"] = _said(lambda: checkpoint().restore(f"{folder}/rank-{1 - rank}/ckpt-1"))
    found["whole"] = _said(lambda: checkpoint().restore(f"{folder}/whole"))
    if rank == 0:
        found["alone"] = _said(lambda: checkpoint().save(f"{folder}/alone/ckpt"))
    sw.shutdown()
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["keras3", "legacy"])
def found(request, tmp_path_factory):
    env = {"TF_USE_LEGACY_KERAS": "1"} if request.param else {}
    folder = str(tmp_path_factory.mktemp("files"))
    return run_ranks(_on_a_rank, 2, folder, env=env, timeout_s=120)


@pytest.mark.parametrize("call", ONE_PATH)
def test_one_path_for_all_ranks_is_refused_and_nothing_is_written(call, found):
    for rank in found:
        assert "has one path on ranks 0, 1" in rank[call]
        assert "/one" in rank[call]
        assert "Save by sw.CheckpointManager(checkpoint, directory) on all ranks" in rank[call]
        assert "one" not in rank["files"]


def test_each_rank_goes_on_from_a_file_of_its_own(found):
    for rank in found:
        assert max(rank["goes on"]) < 1e-7


def test_a_rank_that_saves_alone_is_refused(found):
    said = found[0]["alone"]
    assert "tf.train.Checkpoint.save() writes the variables that rank 0 holds" in said
    assert "ranks 0, 1 have to write theirs, too. Rank 1 has not come" in said
    assert "Save by sw.CheckpointManager" in said


def test_a_file_that_lacks_what_a_rank_holds_is_refused(found):
    """Bug: the variables kept the values that they had."""
    for number, rank in enumerate(found):
        assert f"rank-{1 - number}/ckpt-1 has no value for l" in rank["of another"]
        assert f"which rank {number} holds now" in rank["of another"]


def test_a_file_with_the_slots_of_all_variables_is_refused(found):
    """Bug: variables got the slots of others, and with Keras 3 the values of others."""
    for number, rank in enumerate(found):
        assert f"slots for variables that rank {number} does not update" in rank["whole"]
        assert "Restore it in one process" in rank["whole"]


def test_what_all_ranks_have_is_saved_by_one(found):
    assert [rank["others"] for rank in found] == ["", ""]

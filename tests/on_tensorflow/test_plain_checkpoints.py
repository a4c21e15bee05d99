"""``tf.train.Checkpoint`` itself over ranks: none writes its part of a model, or takes a part for the whole.

Bug: ranks wrote the variables that they held over those of the others, into one file.
"""

import os
from types import SimpleNamespace

import numpy as np
import pytest
from keras_features import SETTINGS

from shardwright.errors import UsageError
from shardwright.testing import run_ranks

WAYS = ("save", "write", "manager")


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
    from shardwright.tensorflow.keras_run import keras_run

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

    model.fit(x, x, batch_size=8, verbose=0)
    expected = [each.copy() for each in model.get_weights()]
    found = {
        "save": _said(lambda: checkpoint().save(f"{folder}/one/ckpt")),
        "write": _said(lambda: checkpoint().write(f"{folder}/one/ckpt")),
        "manager": _said(lambda: tf.train.CheckpointManager(checkpoint(), f"{folder}/rank-{rank}", 1).save()),
    }
    found["files"] = os.listdir(folder)
    others = tf.train.Checkpoint(count=tf.Variable(1))
    found["others"] = _said(lambda: rank == 0 and others.save(f"{folder}/others/ckpt"))
    own = tf.train.Checkpoint(model=model)
    with keras_run().variables.left_out():  # as smp.CheckpointManager writes it
        own.write(f"{folder}/part-{rank}")
    model.fit(x, x, batch_size=8, verbose=0)
    own.read(f"{folder}/part-{rank}")
    found["read"] = [np.abs(a - b).max() for a, b in zip(model.get_weights(), expected, strict=True)]
    sw.barrier()
    found["of another"] = _said(lambda: own.read(f"{folder}/part-{1 - rank}"))
    found["whole"] = _said(lambda: checkpoint().restore(f"{folder}/whole"))
    sw.shutdown()
    return found


@pytest.fixture(scope="module", params=[False, True], ids=["keras3", "legacy"])
def found(request, tmp_path_factory):
    env = {"TF_USE_LEGACY_KERAS": "1"} if request.param else {}
    folder = str(tmp_path_factory.mktemp("files"))
    return run_ranks(_on_a_rank, 2, folder, env=env, timeout_s=120)


@pytest.mark.parametrize("call", WAYS)
def test_a_part_of_a_model_is_written_by_no_rank(call, found):
    for number, rank in enumerate(found):
        assert (
            f"would write the variables that rank {number} holds, and other ranks hold the rest" in rank[call]
        )
        assert "Save by sw.CheckpointManager(checkpoint, directory) on all ranks" in rank[call]
        assert not any(name.startswith(("one", "ckpt")) for name in rank["files"])


def test_each_rank_reads_the_part_that_it_holds(found):
    for rank in found:
        assert max(rank["read"]) == 0


def test_a_file_that_lacks_what_a_rank_holds_is_refused(found):
    """Bug: the variables kept the values that they had."""
    for number, rank in enumerate(found):
        assert f"part-{1 - number} has no value for l" in rank["of another"]
        assert f"which rank {number} holds now" in rank["of another"]


def test_a_file_with_the_slots_of_all_variables_is_refused(found):
    """Bug: variables got the slots of others, and with Keras 3 the values of others."""
    for number, rank in enumerate(found):
        assert f"slots for variables that rank {number} does not update" in rank["whole"]
        assert "Restore it in one process" in rank["whole"]


def test_slots_that_replicas_share_are_in_no_file():
    """Bug: a checkpoint of the model alone was refused, too."""
    import tensorflow as tf

    from shardwright.tensorflow.startup import _refuse_parts

    own, optimizer = tf.Variable(1.0), tf.train.Checkpoint()
    run = SimpleNamespace(
        is_placed=True,
        rank=0,
        variables=SimpleNamespace(
            are_whole=False, are_left_out=False, holder=lambda each: 0 if each is own else None
        ),
        optimizers_in_parts={id(optimizer): optimizer},
        shared_updates=object(),
    )
    _refuse_parts(run, "save()", tf.train.Checkpoint(count=tf.Variable(1)))
    with pytest.raises(UsageError, match=r"would write the variables that rank 0 holds"):
        _refuse_parts(run, "save()", tf.train.Checkpoint(model=own))
    with pytest.raises(UsageError, match=r"with shard_optimizer_state each replica has slots"):
        _refuse_parts(run, "save()", tf.train.Checkpoint(model=own, optimizer=optimizer))

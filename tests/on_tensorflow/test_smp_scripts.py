"""Scripts for SageMaker's libraries and for Horovod run as they are."""

import os
import runpy
import sys
import warnings

import numpy as np
import pytest

from shardwright.errors import UsageError
from shardwright.testing import run_ranks

SCRIPTS = os.path.join(os.path.dirname(__file__), "scripts")
LEGACY = {"TF_USE_LEGACY_KERAS": "1"}


def _run(script, names, *arguments):
    """Some variables of a script that has run to its end."""
    os.environ["SHARDWRIGHT_SET"] = '{"profile": "estimated", "run_dir": "off", "report": false}'
    warnings.filterwarnings("ignore", "__array__ implementation", DeprecationWarning)
    from smdistributed import horovod

    horovod.provide()
    sys.argv = [script, *arguments]
    found = runpy.run_path(os.path.join(SCRIPTS, script), run_name="__main__")
    return {name: found[name] for name in names.split()}


def test_horovod_averages_over_the_replicas_of_a_pipeline():
    ranks = run_ranks(_run, 4, "hybrid_hvd.py", "losses weights ranks", env=LEGACY, timeout_s=150)
    assert [rank["ranks"][1:] for rank in ranks] == [(0, 2, 0, 0), (1, 2, 1, 0), (0, 2, 0, 1), (1, 2, 1, 1)]
    for rank in ranks:
        assert rank["losses"] == ranks[0]["losses"]
        assert sum(rank["losses"][-2:]) < sum(rank["losses"][:2])  # an epoch has two batches
        for mine, first in zip(rank["weights"], ranks[0]["weights"], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_a_data_parallel_script_trains_one_model():
    names = "losses weights ranks product"
    ranks = run_ranks(_run, 2, "data_parallel_mnist.py", names, env=LEGACY, timeout_s=100)
    assert [rank["ranks"] for rank in ranks] == [(0, 2, 0, 2), (1, 2, 1, 2)]
    for rank in ranks:
        assert rank["product"] == 6.0
        assert rank["losses"] == ranks[0]["losses"]
        assert sum(rank["losses"][-2:]) < sum(rank["losses"][:2])
        for mine, first in zip(rank["weights"], ranks[0]["weights"], strict=True):
            np.testing.assert_array_equal(mine, first)


def test_a_communicator_of_mpi4py_is_refused_with_what_to_call():
    import smdistributed.dataparallel.tensorflow as sdp

    with pytest.raises(UsageError, match=r"rank\(\) and size\(\), broadcast"):
        sdp.get_worker_comm()


@pytest.mark.parametrize("env", [LEGACY, {}], ids=["legacy", "keras3"])
def test_horovod_has_callbacks_and_an_optimizer_for_fit(env):
    names = "history weights rates weights_again updates"
    ranks = run_ranks(_run, 2, "keras_hvd.py", names, env=env, timeout_s=150)
    for rank in ranks:
        assert rank["history"] == ranks[0]["history"]
        assert rank["history"]["loss"][-1] < rank["history"]["loss"][0]
        assert rank["rates"] == pytest.approx([0.015, 0.02, 0.002])
        assert rank["updates"] == 16  # 12 of them before the model was saved
        for name in ("weights", "weights_again"):
            for mine, first in zip(rank[name], ranks[0][name], strict=True):
                np.testing.assert_array_equal(mine, first)


def _trained(smp, tf, directory, placed, *, restores):
    """The error of a run whose first `placed` layers are on rank 0; it saves, or restores before its step."""
    smp.init({"partitions": 2, "microbatches": 2, "auto_partition": False, "default_partition": 1})
    layers = [tf.keras.layers.Dense(4, name=f"l{number}") for number in range(3)]
    with smp.partition(0):
        layers[:placed] = [tf.keras.layers.Dense(4, name=f"l{number}") for number in range(placed)]
    model = smp.DistributedModel(tf.keras.Sequential(layers, name="net"))
    model(tf.zeros([2, 4]))
    manager = smp.CheckpointManager(model, directory)
    assert manager.restore("ckpt-7").expect_partial() is not None  # absent: nothing happens
    if restores:
        manager.restore().expect_partial()
    try:
        smp.step(lambda x: tf.reduce_mean(model(x)))(tf.ones([4, 4]))
        if not restores:
            manager.save()
    except Exception as error:
        return str(error)
    finally:
        smp.shutdown()
    return ""


def _files_and_partitions(folder):
    import tensorflow as tf

    import smdistributed.modelparallel.tensorflow as smp

    os.environ["SHARDWRIGHT_SET"] = '{"profile": "estimated", "run_dir": "off", "report": false}'
    rank = int(os.environ["RANK"])
    root = os.path.join(folder, f"host_{rank}")
    smp.init({"partitions": 2})
    os.makedirs(os.path.join(root, f"mp_rank_{rank}"))
    with open(os.path.join(root, f"mp_rank_{rank}", "checkpoint"), "w") as file:
        file.write(f"of rank {rank}")
    if rank == 1:
        smp.utils.send_checkpoint_files(root, 0)
    else:
        smp.utils.receive_checkpoint_files(root, 1)
    comm = smp.get_worker_comm()
    told = comm.bcast("from 1" if comm.rank == 1 else None, root=1), comm.Get_size()
    files = sorted(os.listdir(root))
    smp.shutdown()
    directory = os.path.join(folder, "of_partitions")
    errors = [
        _trained(smp, tf, directory, placed, restores=restores)
        for placed, restores in ((1, False), (1, True), (2, True))
    ]
    return files, told, errors


def _each(folder):
    """The scripts for two partitions one after the other, in one job."""
    import smdistributed.modelparallel.tensorflow as smp

    found = []
    for script, names, argument in (
        ("checkpoint_test.py", "loss_list again partitioned names", "checkpoints"),
        ("checkpoint_test.py", "loss_list", "checkpoints"),
        ("mnist_conv.py", "served wanted final", "model"),
    ):
        found.append(_run(script, names, os.path.join(folder, argument)))
        smp.shutdown()
    return *found, _files_and_partitions(folder)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The folder, and for each script what it tells on both ranks."""
    folder = tmp_path_factory.mktemp("scripts")
    ranks = run_ranks(_each, 2, str(folder), env=LEGACY, timeout_s=200)
    return folder, list(zip(*ranks, strict=True))


def test_a_checkpoint_script_goes_on_where_it_saved(scripts):
    folder, (first, second, *_) = scripts
    for number, rank in enumerate(first):
        assert rank["partitioned"] == [True]
        assert "checkpoint" in rank["names"]
        assert {name for name in rank["names"] if name.endswith(".index")} == {"ckpt-2.index", "ckpt-3.index"}
        assert (folder / "checkpoints" / f"mp_rank_{number}" / "checkpoint").exists()
        assert len(rank["loss_list"]) == 8
        assert rank["loss_list"] == first[0]["loss_list"]
    for rank in second:  # begins from ckpt-3, which has all that the first run has trained but `again`
        assert rank["loss_list"][:4] == pytest.approx(first[0]["again"], rel=1e-5)

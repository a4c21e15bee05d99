"""A run that stops and goes on from a checkpoint gives what one gives that goes on at once."""

import os
import signal
import subprocess
import sys

import pytest
from keras_features import SETTINGS, data, layers

from choices import thorough
from shardwright.errors import CorruptCheckpointError
from shardwright.testing import RanksFailedError, run_ranks


def _losses(folder, ranks, optimizer, *, saves_after, steps, in_function=False):
    """Losses of some steps, from the newest checkpoint on."""
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({"pipeline_parallel_degree": ranks, **SETTINGS})
    named = [
        layer.__class__.from_config({**layer.get_config(), "name": f"l{i}"})
        for i, layer in enumerate(layers(tf))
    ]
    model = sw.DistributedModel(tf.keras.Sequential(named, name="net"))
    model(tf.zeros([2, 12]))
    optimizer = {
        "adam": lambda: tf.keras.optimizers.Adam(0.01),
        "sgd": lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
        "legacy": lambda: tf.keras.optimizers.legacy.Adam(0.01),
    }[optimizer]()
    count = tf.Variable(0, dtype=tf.int64)
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @sw.step
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    def train(x, y):
        gradients, loss = step(x, y)
        means = [each.accumulate() for each in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return loss.reduce_mean()

    if in_function:
        train = tf.function(train)
    manager = sw.CheckpointManager(
        tf.train.Checkpoint(net=model, optimizer=optimizer, count=count), folder, max_to_keep=2
    )
    manager.restore()
    losses = []
    while int(count) < steps:
        losses.append(float(train(*map(tf.constant, data(16 + int(count))))))
        count.assign_add(1)
        if int(count) in saves_after:
            manager.save()
    left = len(manager.checkpoints)
    sw.shutdown()
    return losses, left


def _of_each(folder, ranks, optimizers, saves_after, steps):
    return {
        name: _losses(
            f"{folder}/{name}", ranks, name, saves_after=saves_after, steps=steps, in_function=ranks == 2
        )
        for name in optimizers
    }


def _begun(folder, optimizers):
    """Six steps at once, and the first three of a run that stops."""
    return [
        _of_each(f"{folder}/{name}", 2, optimizers, saves_after, steps)
        for name, saves_after, steps in (("whole", (), 6), ("run", (1, 2, 3), 3))
    ]


@pytest.mark.parametrize("legacy", [False, thorough(True)], ids=["keras3", "legacy"])
def test_it_goes_on_with_another_number_of_ranks(legacy, tmp_path):
    env = {"TF_USE_LEGACY_KERAS": "1"} if legacy else {}
    optimizers = ["adam", "legacy"] if legacy else ["adam", "sgd"]

    def run(ranks, saves_after, steps):
        arguments = (str(tmp_path / "run"), ranks, optimizers, saves_after, steps)
        return run_ranks(_of_each, ranks, *arguments, env=env, timeout_s=200)

    begun = run_ranks(_begun, 2, str(tmp_path), optimizers, env=env, timeout_s=200)
    expected = begun[0][0]
    parts = [[part for _, part in begun], run(1, (4,), 4)]
    if not legacy:  # names of slots, which both have seen by now
        parts.append(run(2, (), 6))
    for ranks, begin, end in zip(parts, (0, 3, 4), (3, 4, 6), strict=False):
        for rank in ranks:
            for name in optimizers:
                losses, left = rank[name]
                assert losses == pytest.approx(expected[name][0][begin:end], rel=2e-6)
                assert left == 2


def _killed(folder, at):
    """Saves twice; rank 1 dies at an operation on the disk of the second save. Gives the count of them."""
    import tensorflow as tf

    import shardwright.tensorflow as sw

    sw.init({"pipeline_parallel_degree": 2, **SETTINGS})
    tf.keras.utils.set_random_seed(1)
    model = sw.DistributedModel(
        tf.keras.Sequential([tf.keras.layers.Dense(4, name=f"l{i}") for i in range(2)], name="net")
    )
    model(tf.zeros([2, 12]))
    step = sw.step(lambda x: tf.reduce_mean(model(x)))
    value = float(step(tf.ones([8, 12])).reduce_mean())
    manager = sw.CheckpointManager(model, folder, max_to_keep=1)
    found = manager.restore() is not None
    count = 0

    def die(_operation, _path):
        nonlocal count
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        count += 1

    if not found:
        manager.save()
        if sw.rank() == 1:
            manager._disk._before = die
        manager.save()
    sw.shutdown()
    return count, found, value


def _saved_twice(folder):
    """Operations on the disk in a save; and a checkpoint to be damaged."""
    count, _, _ = _killed(f"{folder}/whole", 10**6)
    _of_each(folder, 2, ["sgd"], (1,), 1)
    return count


def _restored(folder):
    """Whether the torn save has left a checkpoint; the damaged one is refused."""
    _, found, _ = _killed(f"{folder}/torn", 10**6)
    with pytest.raises(CorruptCheckpointError, match="checksum"):
        _losses(f"{folder}/sgd", 2, "sgd", saves_after=(), steps=2)
    return found


def test_a_torn_save_leaves_what_loads_and_a_damaged_one_is_refused_on_all_ranks(tmp_path):
    count = run_ranks(_saved_twice, 2, str(tmp_path), timeout_s=100)[1]
    folder = str(tmp_path / "torn")
    with pytest.raises(RanksFailedError):
        run_ranks(_killed, 2, folder, count // 2, timeout_s=60)
    for command in ("ls", "verify"):
        words = [sys.executable, "-m", "shardwright", "ckpt", command, folder]
        told = subprocess.run(words, capture_output=True, text=True, timeout=60)
        assert told.returncode == 0, told.stderr
        assert "1" in told.stdout
    file = next(tmp_path.glob("sgd/step-*/rank-00001.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert all(run_ranks(_restored, 2, str(tmp_path), timeout_s=100))

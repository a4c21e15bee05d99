"""A model whose parameters and slots are larger than what a rank may use trains over two ranks."""

import signal
from contextlib import ExitStack, nullcontext
from pathlib import Path

import numpy as np
import pytest
from keras_features import SETTINGS

from shardwright.testing import run_ranks, run_ranks_outcomes

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
WIDTH, LAYERS, STEPS, MICROBATCHES = 1536, 24, 2, 2
BY_HAND = {"auto_partition": False, "default_partition": 1}
STATE_BYTES = 3 * 4 * LAYERS * WIDTH * (WIDTH + 1)  # Adam has two numbers for each parameter
LIMIT_BYTES = int(0.98 * STATE_BYTES)


def _limit_memory(folders):
    """From now on this process may touch `LIMIT_BYTES` of memory, besides what it has."""
    import torch.distributed as dist

    from memory_limit import join

    if folders:
        join(Path(folders[dist.get_rank()]))


def _model(tf, first_half=nullcontext):
    with first_half():
        dense = [tf.keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS // 2)]
    dense += [tf.keras.layers.Dense(WIDTH, activation="tanh") for _ in range(LAYERS // 2)]
    return tf.keras.Sequential([tf.keras.Input((WIDTH,)), *dense])


def _trained(model, tf, step, total):
    optimizer = tf.keras.optimizers.Adam(1e-3)
    x = tf.constant(np.random.RandomState(0).rand(4, WIDTH), tf.float32)
    losses = []
    for _ in range(STEPS):
        gradients, loss = step(x)
        optimizer.apply_gradients(zip(map(total, gradients), model.trainable_variables, strict=True))
        del gradients  # the next ones have their place
        losses.append(float(total(loss)))
    return losses


def _step_of(model, tf, microbatches):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - x) ** 2) / microbatches
        return tape.gradient(loss, model.trainable_variables), loss

    return step


def _in_one_process(folders):
    import tensorflow as tf

    _limit_memory(folders)
    tf.keras.utils.set_random_seed(6)
    model = _model(tf)
    return _trained(model, tf, tf.function(_step_of(model, tf, 1)), lambda each: each)


def _over_two_ranks(folders):
    import tensorflow as tf

    import shardwright.tensorflow as sw

    _limit_memory(folders)
    sw.init(
        {
            "pipeline_parallel_degree": 2,
            **SETTINGS,
            "microbatches": MICROBATCHES,
            "pipeline": "1f1b",
            **BY_HAND,
        }
    )
    tf.keras.utils.set_random_seed(6)
    with sw.delayed_initialization():
        model = _model(tf, lambda: sw.partition(0))
    model = sw.DistributedModel(model)
    losses = _trained(model, tf, sw.step(_step_of(model, tf, MICROBATCHES)), lambda each: each.reduce_sum())
    sw.shutdown()
    return losses


@pytest.mark.sweep
def test_a_model_larger_than_the_limit_of_a_rank_trains(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    from memory_limit import MemoryLimit, missing_for_memory_limits

    if missing := missing_for_memory_limits():
        pytest.skip(missing)
    (expected,) = run_ranks(_in_one_process, 1, (), timeout_s=100)
    with ExitStack() as stack:
        limits = [stack.enter_context(MemoryLimit(LIMIT_BYTES)) for _ in range(3)]
        folders = [str(limit.folder) for limit in limits]
        (alone,) = run_ranks_outcomes(_in_one_process, 1, folders[2:], timeout_s=100)
        assert alone.exit_code == -signal.SIGKILL
        assert limits[2].num_killed == 1
        for losses in run_ranks(_over_two_ranks, 2, folders, timeout_s=100):
            np.testing.assert_allclose(losses, expected, rtol=1e-5)
        peaks = [limit.peak_bytes for limit in limits[:2]]
    assert all(0 < peak <= LIMIT_BYTES for peak in peaks)
    print(f"of {LIMIT_BYTES / 2**20:.0f} MiB each rank has used", *(f"{p / 2**20:.0f}" for p in peaks))

"""What scripts do around a step: clipping, Adam, uneven batches, evaluation, placement, plan files.

Each function is a script that runs as it is in one process and over ranks; ``wrap`` and ``step`` are what
Shardwright adds to it.
"""

import functools
import os
import traceback

import numpy as np

from shardwright.testing import run_ranks

MICROBATCHES = 4
SETTINGS = {"microbatches": MICROBATCHES, "profile": "estimated", "run_dir": "off", "report": False}


class Plain:
    """Shardwright's part of a script, in one process without Shardwright."""

    name = "plain"

    def wrap(self, model):
        return model

    def step(self, function=None, *, input_signature=None):
        """Runs a function for each microbatch; gives the list of results of each output."""
        if function is None:
            return functools.partial(self.step, input_signature=input_signature)
        import tensorflow as tf

        compiled = tf.function(function)

        def run(*arguments):
            parts = zip(*(np.array_split(a, min(MICROBATCHES, len(a))) for a in arguments), strict=True)
            results = []
            for part in parts:
                if input_signature:
                    part = [tf.cast(p, s.dtype) for p, s in zip(part, input_signature, strict=True)]
                results.append(compiled(*map(tf.convert_to_tensor, part)))
            return _transposed(results)

        return run

    def mean(self, output):
        import tensorflow as tf

        return functools.reduce(tf.add, output) / tf.cast(len(output), output[0].dtype)

    def all_rows(self, output):
        import tensorflow as tf

        return tf.concat(output, 0)


def _transposed(results):
    if isinstance(results[0], (list, tuple)):
        return type(results[0])(_transposed(list(each)) for each in zip(*results, strict=True))
    return results


class OverRanks:
    """Shardwright's part of a script."""

    def __init__(self, settings=None):
        import shardwright.tensorflow as sw

        self.sw = sw
        self.name = f"rank {os.environ['RANK']}"
        plan = settings if isinstance(settings, str) else None
        given = {"pipeline_parallel_degree": int(os.environ["WORLD_SIZE"]), **SETTINGS, **(settings or {})}
        sw.init(plan or given)
        self.wrap, self.step = sw.DistributedModel, sw.step

    def mean(self, output):
        return output.reduce_mean()

    def all_rows(self, output):
        return output.merge()


def layers(tf):
    L = tf.keras.layers
    tf.keras.utils.set_random_seed(3)
    return [L.Dense(16, activation="relu"), L.Dense(16, activation="tanh"), L.Dense(16), L.Dense(10)]


def data(num_samples):
    random = np.random.RandomState(num_samples)
    return random.rand(num_samples, 12).astype("f"), random.randint(0, 10, num_samples)


def trained(side, *, optimizer, steps=10, num_samples=16, clip=None, in_function=False, signature=None):
    """Losses, predictions and this rank's variables after some steps."""
    import tensorflow as tf

    model = side.wrap(tf.keras.Sequential(layers(tf)))
    model(tf.zeros([2, 12]))
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = optimizer(tf)

    @side.step(input_signature=signature(tf) if signature else None)
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(y, model(x, training=True))
        return tape.gradient(loss, model.trainable_variables), loss

    @side.step
    def evaluate(x, y):
        predictions = model(x, training=False)
        return loss_of(y, predictions), predictions

    def train(x, y):
        gradients, loss = step(x, y)
        means = [side.mean(each) for each in gradients]
        norm = tf.zeros([])
        if clip is not None:
            means, norm = tf.clip_by_global_norm(means, clip)
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return side.mean(loss), norm

    if in_function and side.name != "plain":
        train = tf.function(train)
    sizes = num_samples if isinstance(num_samples, tuple) else (num_samples,)
    figures = []
    for number in range(steps):
        x, y = data(sizes[number % len(sizes)])
        if signature:
            x = x.astype("float64")
        loss, norm = train(x, y)
        figures.append([float(loss), float(norm)])
    loss, predictions = evaluate(*data(max(sizes)))
    figures.append([float(side.mean(loss)), 0.0])
    iterations = int(optimizer.iterations)
    return figures, np.asarray(side.all_rows(predictions)), iterations


def adam(tf):
    return tf.keras.optimizers.Adam(0.01)


def adam_by_global_norm(tf):
    return tf.keras.optimizers.Adam(0.01, global_clipnorm=0.05)


def sgd_by_global_norm(tf):
    return tf.keras.optimizers.SGD(0.5, global_clipnorm=0.05)


def float32(tf):
    return [tf.TensorSpec([None, 12], tf.float32), tf.TensorSpec([None], tf.int64)]


def sgd(tf):
    return tf.keras.optimizers.SGD(0.5)


SCRIPTS = {
    "adam": {"optimizer": adam},
    "adam-in-function": {"optimizer": adam, "in_function": True},
    "global_clipnorm": {"optimizer": sgd_by_global_norm, "steps": 4},
    "global_clipnorm-adam-in-function": {"optimizer": adam_by_global_norm, "steps": 4, "in_function": True},
    "clip_by_global_norm": {"optimizer": sgd, "steps": 4, "clip": 0.05},
    "clip_by_global_norm-in-function": {"optimizer": sgd, "steps": 4, "clip": 0.05, "in_function": True},
    "uneven": {"optimizer": sgd, "steps": 4, "num_samples": (14, 7, 3, 1)},
    "uneven-in-function": {"optimizer": sgd, "steps": 4, "num_samples": (14, 7, 3, 1), "in_function": True},
    "signature": {"optimizer": sgd, "steps": 2, "signature": float32},
    "signature-in-function": {"optimizer": sgd, "steps": 2, "signature": float32, "in_function": True},
}


def _each(name_of_side):
    found = {}
    for name, script in SCRIPTS.items():
        try:
            side = Plain() if name_of_side == "plain" else OverRanks()
            found[name] = trained(side, **script)
            if name_of_side != "plain":
                side.sw.shutdown()
        except Exception:
            found[name] = traceback.format_exc()
            break
    return found


@functools.cache
def results(*, legacy):
    """What the scripts give: in one process, and on each of two ranks."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    env = {"TF_USE_LEGACY_KERAS": "1"} if legacy else {}
    (expected,) = run_ranks(_each, 1, "plain", env=env, timeout_s=200)
    found = run_ranks(_each, 2, "ranks", env=env, timeout_s=200)
    return expected, found

"""Trains a model of `keras_models` for some steps: as a plain script, and over ranks."""

import functools
import os
import traceback

import numpy as np

from shardwright.errors import UsageError
from shardwright.testing import run_ranks

NUM_SAMPLES = 28


def _step_of(case, model, loss_of, metric, get_gradients):
    """The step function, as a script writes it."""
    import tensorflow as tf

    def step(inputs, labels):
        if case.gradients == "get_gradients":
            predictions = model(inputs, training=True)
            loss = loss_of(labels, predictions)
            gradients = get_gradients(loss, model.trainable_variables)
        else:
            with tf.GradientTape() as tape:
                predictions = model(inputs, training=True)
                loss = loss_of(labels, predictions)
            gradients = tape.gradient(loss, model.trainable_variables)
        gradients = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if case.gradients == "clip":
            gradients, _ = tf.clip_by_global_norm(gradients, 0.05)
        if metric is not None:
            metric.update_state(loss)
        return gradients, loss, predictions

    return step


def _get_gradients(loss, variables):
    """What Keras has had, for plain scripts."""
    import tensorflow as tf

    return tf.gradients(
        loss, [getattr(v, "value", v) if not isinstance(v, tf.Variable) else v for v in variables]
    )


def _made(name, wrap):
    import keras_models
    import tensorflow as tf

    case = keras_models.make(name, NUM_SAMPLES)
    model = wrap(case.model)
    model(tf.constant(case.inputs[:2]))
    loss_of = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    metric = tf.keras.metrics.Mean() if case.metric else None
    optimizer = tf.keras.optimizers.SGD(0.05, momentum=0.9)
    get_gradients = getattr(optimizer, "get_gradients", _get_gradients)
    return case, model, _step_of(case, model, loss_of, metric, get_gradients), optimizer, metric


def _plain(name, microbatches, steps):
    """One process, without Shardwright: microbatch after microbatch."""
    import tensorflow as tf

    case, model, step, optimizer, metric = _made(name, lambda model: model)
    compiled = tf.function(step)
    losses, gradients = [], []
    for _ in range(steps):
        parts = zip(
            np.array_split(case.inputs, microbatches), np.array_split(case.labels, microbatches), strict=True
        )
        results = [compiled(tf.constant(x), tf.constant(y)) for x, y in parts]
        total = [functools.reduce(tf.add, each) for each in zip(*(r[0] for r in results), strict=True)]
        means = [each / tf.cast(microbatches, each.dtype) for each in total]
        gradients.append([each.numpy() for each in means])
        losses.append([float(r[1]) for r in results])
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
    predictions = np.concatenate([r[2].numpy() for r in results])
    state = [np.asarray(v) for v in model.variables]
    return losses, gradients, predictions, state, None if metric is None else float(metric.result())


def _value_here(variable):
    """The value of a variable; without elements where another rank holds it."""
    try:
        return np.asarray(variable)
    except UsageError:
        return np.zeros([0])


def _over_ranks(name, microbatches, steps, settings, in_function):
    """One rank of a pipeline."""
    import tensorflow as tf

    import shardwright.tensorflow as sw

    ranks = int(os.environ["WORLD_SIZE"])
    sw.init(
        {
            "pipeline_parallel_degree": ranks,
            "microbatches": microbatches,
            "profile": "estimated",
            "run_dir": "off",
            "report": False,
            **settings,
        }
    )
    case, model, step, optimizer, metric = _made(name, sw.DistributedModel)
    step = sw.step(step)

    def train(inputs, labels):
        gradients, loss, predictions = step(inputs, labels)
        means = [gradient.accumulate() for gradient in gradients]
        optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
        return means, loss.stack(), predictions.merge()

    if in_function:
        train = tf.function(train)
    losses, gradients = [], []
    for _ in range(steps):
        means, loss, predictions = train(tf.constant(case.inputs), tf.constant(case.labels))
        losses.append(loss.numpy().tolist())
        gradients.append([None if each is None else each.numpy() for each in means])
    state = [_value_here(v) for v in model.variables]
    result = None if metric is None else float(metric.result())
    sw.shutdown()
    return losses, gradients, predictions.numpy(), state, result


@functools.cache
def results(cases, *, legacy=False, ranks=2, steps=2):
    """What a plain script and what ranks give, for each case: `plain` and `over_ranks` in two calls."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    env = {"SHARDWRIGHT_CACHE": "off", **({"TF_USE_LEGACY_KERAS": "1"} if legacy else {})}
    expected = run_ranks(_plain_each, 1, cases, steps, env=env, timeout_s=280)[0]
    found = run_ranks(_over_ranks_each, ranks, cases, steps, env=env, timeout_s=280)
    return expected, {case: [rank.get(case, "not run") for rank in found] for case in cases}


def _plain_each(cases, steps):
    wanted = {(name, microbatches) for name, microbatches, _, _ in cases}
    return {each: _plain(*each, steps) for each in sorted(wanted)}


def _over_ranks_each(cases, steps):
    found = {}
    for case in cases:
        name, microbatches, settings, in_function = case
        try:
            found[case] = _over_ranks(name, microbatches, steps, dict(settings), in_function)
        except Exception:
            found[case] = traceback.format_exc()
            break  # the other ranks have failed as well, or will
    return found


def assert_equal(expected, found, *, tolerance=0.0):
    """Every rank has the losses of the plain script; gradients and variables are somewhere."""
    losses, gradients, predictions, state, metric = expected
    scale = max(np.abs(each).max() for step in gradients for each in step)
    held = set()
    for rank in found:
        assert not isinstance(rank, str), rank
    for rank_losses, rank_gradients, rank_predictions, rank_state, rank_metric in found:
        np.testing.assert_allclose(rank_losses, losses, rtol=tolerance, atol=0)
        # Pieces fuse other operations than the whole: a U-Net's predictions are off by 1e-6, or a bit more.
        np.testing.assert_allclose(
            rank_predictions, predictions, rtol=0, atol=2 * tolerance * np.abs(predictions).max()
        )
        assert rank_metric == metric or abs(rank_metric - metric) <= tolerance * abs(metric)
        for step, (mine, theirs) in enumerate(zip(rank_gradients, gradients, strict=True)):
            for position, (gradient, wanted) in enumerate(zip(mine, theirs, strict=True)):
                if gradient is not None:
                    held.add((step, position))
                    np.testing.assert_allclose(gradient, wanted, rtol=0, atol=tolerance * scale)
        for mine, wanted in zip(rank_state, state, strict=True):
            if mine.size:
                largest = max(1.0, float(np.abs(wanted).max()))
                np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e3 * tolerance * largest)
    assert held == {(step, p) for step, each in enumerate(gradients) for p in range(len(each))}
    for position, wanted in enumerate(state):
        assert any(np.shape(rank[3][position]) == np.shape(wanted) for rank in found)

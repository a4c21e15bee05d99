"""What cannot be run over ranks is refused, with the line and with what to do."""

import os

import numpy as np
import pytest

from shardwright.errors import UsageError
from shardwright.testing import run_ranks

SETTINGS = {"microbatches": 2, "profile": "estimated", "run_dir": "off", "report": False}


def _message(tf, sw, make):
    """The error of a step that `make` gives, on this rank."""
    sw.init({"pipeline_parallel_degree": 2, **SETTINGS})
    layers = tf.keras.layers
    model = sw.DistributedModel(
        tf.keras.Sequential([layers.Dense(8, name="first"), layers.Dense(8), layers.Dense(8, name="last")])
    )
    model(tf.zeros([2, 8]))
    step = sw.step(make(tf, model))
    if make is _text_given:
        step = tf.function(step)
    try:
        step(tf.constant(BATCHES.get(make, np.ones([4, 8], "f"))))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    else:
        return "no error"
    finally:
        sw.shutdown()


def _uphill(tf, model):
    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        (gradient,) = tape.gradient(loss, model.trainable_variables[:1])
        model.layers[2].bias.assign_add(tf.fill([8], tf.reduce_mean(gradient)))
        return loss

    return step


def _optimizer_inside(tf, model):
    optimizer = tf.keras.optimizers.SGD()

    def step(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def _text(tf, model):
    def step(x):
        return tf.strings.as_string(model(x))

    return step


def _nothing(tf, model):
    def step(x):
        model(x)

    return step


def _shape_of_values(tf, model):
    def step(x):
        y = model.layers[0](x)
        chosen = tf.boolean_mask(y, tf.reduce_sum(y, 1) > 0.0)
        return tf.reduce_sum(model.layers[2](model.layers[1](chosen)))

    return step


def _layer_in_loop(tf, model):
    def step(x):
        for _ in tf.range(2):
            x = model(x)
        return tf.reduce_mean(x)

    return step


def _written_by_a_later_stage(tf, model):
    first, last = model.layers[0], model.layers[2]

    def step(x):
        loss = tf.reduce_mean(last(model.layers[1](first(x))))
        first.bias.assign_add(tf.fill([8], loss))
        return loss

    return step


def _text_given(tf, model):
    def step(words):
        others = tf.boolean_mask(words, words != "b")  # of a shape that follows from them
        return tf.reduce_mean(model(tf.zeros([tf.shape(others)[0], 8])))

    return step


def _empty(tf, model):
    return lambda rows: tf.reduce_mean(model(rows))


# What a step is given, where that is not four rows of numbers.
BATCHES = {_text_given: np.array(["a", "b", "c", "d"]), _empty: np.ones([0, 8], "f")}
CASES = {
    _uphill: ["of a variable that stage 1 holds needs what stage 0 makes", "test_refused.py:"],
    _optimizer_inside: ["optimizer is applied inside of a step function", "test_refused.py"],
    _text: ["cannot be sent to the other ranks"],
    _text_given: ["the argument words of the step function is text", "in tf.data"],
    # Rank 0 said "num_split of 0 must be at least minimum 1", and rank 1 something else.
    _empty: ["UsageError: the batch is empty: rows has 0 rows along axis 0."],
    _nothing: ["returns no tensor"],
    _shape_of_values: ["follows from values", "test_refused.py:"],
    _layer_in_loop: ["is called inside of a loop"],
    _written_by_a_later_stage: ["of a variable that stage 0 holds", "test_refused.py:"],
}


def _without_a_model():
    import tensorflow as tf

    import shardwright.tensorflow as sw

    found = []
    step = sw.step(lambda x: x)
    batch = np.zeros([2], "f")
    for _ in range(2):
        try:
            step(batch)
        except Exception as error:
            found.append(str(error))
        if not sw.is_initialized():
            sw.init({**SETTINGS, "pipeline_parallel_degree": 2})
    for make in (
        lambda: sw.step(lambda x: x, non_split_inputs=["y"]),
        lambda: sw.init({**SETTINGS}),
        lambda: sw.StepOutput([tf.constant(1.0)]) + 1,
        lambda: sw.StepOutput([tf.constant(1.0)]).item(),
        lambda: sw.partition(7).__enter__(),
    ):
        try:
            make()
        except Exception as error:
            found.append(str(error))
    sw.shutdown()
    try:
        sw.init({**SETTINGS, "bf16": True})
    except Exception as error:
        found.append(str(error))
    return found


def _messages():
    import tensorflow as tf

    import shardwright.tensorflow as sw

    assert os.environ["WORLD_SIZE"] == "2"
    at_wrong_time = _without_a_model()
    return {case.__name__: _message(tf, sw, case) for case in CASES}, at_wrong_time


@pytest.fixture(scope="module")
def messages():
    return run_ranks(_messages, 2, timeout_s=120)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_refused_on_both_ranks_with_the_line(case, messages):
    for rank, _ in messages:
        for words in CASES[case]:
            assert words in rank[case.__name__]


def test_calls_at_the_wrong_time(messages):
    expected = [
        "not initialised",
        "no model is wrapped",
        "y is not a parameter",
        "init was called before",
        "a StepOutput is no number",
        "has no attribute item",
        "partition 7 does not exist",
        "bf16: not available with TensorFlow",
    ]
    for _, found in messages:
        for text, words in zip(found, expected, strict=True):
            assert words in text


def test_a_model_that_is_wrapped_stays_what_it_is():
    """A name was left out silently."""
    import tensorflow as tf

    import shardwright.tensorflow as sw

    model = tf.keras.Sequential([])
    with pytest.raises(UsageError, match="was given name beside the model"):
        sw.DistributedModel(model, name="other")
    assert type(model) is tf.keras.Sequential

"""``model.fit``, ``evaluate`` and ``predict`` over the stages.

Keras asks the model for a function of one batch. Ours runs the model's own ``train_step``, of Keras or of
the user, as a step function: once for each microbatch, with all that it writes to metrics. Gradients that it
gives to optimizers are put aside, and applied when the batch has ended::

    train_step(microbatch 0)  ─ gradients ─┐
    train_step(microbatch 1)  ─ gradients ─┴─ mean over the samples ─▶ optimizer.apply_gradients
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.tensorflow import _private
from shardwright.tensorflow.keras_run import KerasRun, keras_run
from shardwright.tensorflow.step import step

__all__ = ["averaged_over_replicas", "predict_function", "test_function", "train_function"]

Logs = dict[str, Any]


def train_function(model: Any) -> Callable[[Iterator[Any]], Logs]:
    """Trains on the next batch of an iterator; gives the metrics.

    Raises:
        UsageError: the optimizer scales losses, or Keras is to make several steps in one call.
    """
    _refuse_what_is_missing(model)
    run = keras_run()
    targets: list[tuple[Any, list[Any]]] = []

    @step
    def one_step(data: Any, per_sample: float | None) -> Any:
        with run.gradients_put_aside() as aside:
            logs = model.train_step(data)
        _note_targets(targets, aside)
        weight = None if per_sample is None else per_sample * _num_samples(data)
        return [[_scaled(each, weight) for each in gradients] for _, gradients, _ in aside], _numbers(logs)

    apply = tf.function(lambda gradients: _apply(targets, gradients), autograph=False)

    def train(iterator: Iterator[Any]) -> Logs:
        data = _next(iterator)
        gradients, logs = one_step(data, _weight_of_a_sample(run, one_step, data))
        apply([[None if each is None else each.reduce_mean() for each in group] for group in gradients])
        _private.count_batch(model)
        return _logs(model, logs)

    return train


def test_function(model: Any) -> Callable[[Iterator[Any]], Logs]:
    """Evaluates the next batch of an iterator; gives the metrics."""
    _refuse_what_is_missing(model)

    @step
    def one_step(data: Any) -> Any:
        return _numbers(model.test_step(data))

    return lambda iterator: _logs(model, one_step(_next(iterator)))


def predict_function(model: Any) -> Callable[[Any], Any]:
    """The outputs of the model for the next batch of an iterator."""
    _refuse_what_is_missing(model)

    @step
    def one_step(data: Any) -> Any:
        return model.predict_step(data)

    def predict(batches: Any) -> Any:
        outputs = one_step(batches[0] if isinstance(batches, (list, tuple)) else _next(batches))
        return tf.nest.map_structure(lambda output: output.merge(), outputs)

    return predict


def averaged_over_replicas(run: KerasRun, logs: Logs) -> Logs:
    """Numbers as means over replicas, so that callbacks decide alike on all ranks; collective."""
    if run.mesh.data == 1 or not run.averages_replicas or run.is_tracing or not logs:
        return logs
    return dict(zip(logs, run.means_over_replicas([float(each) for each in logs.values()]), strict=True))


def _refuse_what_is_missing(model: Any) -> None:
    steps = getattr(model, "steps_per_execution", None) or getattr(model, "_steps_per_execution", None) or 1
    if int(steps) != 1:
        raise UsageError(
            f"steps_per_execution is {int(steps)}, and a pipeline takes one batch at a time. Leave it out of "
            "model.compile; raise the batch size instead."
        )
    optimizer = getattr(model, "optimizer", None)
    if hasattr(optimizer, "inner_optimizer"):
        raise UsageError(
            "model.fit with an optimizer that scales losses (mixed_float16) is not available over stages. "
            'Use tf.keras.mixed_precision.set_global_policy("mixed_bfloat16"), which needs no scale.'
        )


def _next(iterator: Iterator[Any]) -> Any:
    """The next batch; what a data set may lack is None in it."""
    return tf.nest.map_structure(
        lambda each: None if isinstance(each, tf.experimental.Optional) else each, next(iterator)
    )


def _num_samples(data: Any) -> int:
    return int(next(each for each in tf.nest.flatten(data) if each is not None).shape[0])


def _weight_of_a_sample(run: KerasRun, one_step: Any, data: Any) -> float | None:
    """What a sample counts, as against one of an even batch; None where all microbatches have as many.

    Microbatches of an uneven batch would otherwise count alike, and Keras takes the mean over samples.
    """
    if run.plan is None:
        one_step.prepare(data, None)
    assert run.plan is not None
    samples = _num_samples(data)
    microbatches = min(samples, run.plan.schedule.microbatches)
    return None if samples % microbatches == 0 else microbatches / samples


def _scaled(gradient: Any, weight: float | None) -> Any:
    if gradient is None or weight is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * weight, gradient.indices, gradient.dense_shape)
    return gradient * weight


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _note_targets(
    targets: list[tuple[Any, list[Any]]], aside: list[tuple[Any, list[Any], list[Any]]]
) -> None:
    targets[:] = [(optimizer, variables) for optimizer, _, variables in aside]


def _apply(targets: list[tuple[Any, list[Any]]], gradients: list[list[Any]]) -> None:
    for (optimizer, variables), each in zip(targets, gradients, strict=True):
        optimizer.apply_gradients(zip(each, variables, strict=True))


def _numbers(logs: Any) -> Any:
    """What a step has to tell, as tensors."""
    if not isinstance(logs, Mapping):
        return tf.convert_to_tensor(logs)
    return {name: tf.convert_to_tensor(value) for name, value in logs.items()}


def _logs(model: Any, told: Any) -> Logs:
    """The metrics after a batch; what is no metric is the mean of what the step has told."""
    if not isinstance(told, Mapping):
        return {"loss": told.reduce_mean()}
    results = _private.keras_model_class().get_metrics_result(model)  # of this replica
    return {name: results[name] if name in results else each.reduce_mean() for name, each in told.items()}

"""``model.fit``, ``evaluate`` and ``predict`` over the stages.

Keras asks the model for a function of one batch. Ours runs the model's own ``train_step``, of Keras or of
the user, as a step function: once for each microbatch, with all that it writes to metrics. Gradients that it
gives to optimizers are put aside, and applied when the batch has ended::

    train_step(microbatch 0)  ─ gradients ─┐
    train_step(microbatch 1)  ─ gradients ─┴─ those of the batch ─▶ optimizer.apply_gradients

A step that goes on after an update, as a GAN's, applies them at once, where a rank has the whole model and
its batch whole: their means over the replicas.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import tensorflow as tf

from shardwright.runtime.step_function import microbatch_sizes
from shardwright.tensorflow import _private
from shardwright.tensorflow.batch_weights import BatchWeights, Weight, factor_of, told_as_sums
from shardwright.tensorflow.engine import goes_on_after_update
from shardwright.tensorflow.keras_run import KerasRun, keras_run
from shardwright.tensorflow.outputs import mean_of
from shardwright.tensorflow.recorder import Recorder
from shardwright.tensorflow.row_gradients import scaled
from shardwright.tensorflow.step import step

Logs = dict[str, Any]


def train_function(model: Any) -> Callable[[Iterator[Any]], Logs]:
    """Trains on the next batch of an iterator; gives the metrics.

    With ``steps_per_execution`` it takes as many batches, and gives the metrics after the last.
    """
    run = keras_run()
    targets: list[tuple[Any, list[Any]]] = []
    told_metrics: Logs = {}

    def step_of(updates: Callable[[float | None], AbstractContextManager[list[Any]]]) -> Any:
        @step
        def one_step(data: Any, weight: Weight) -> Any:
            factor = factor_of(weight, _num_samples(data))
            with updates(factor) as aside, _results_noted(model) as noted:
                logs = model.train_step(data)
            _note_targets(targets, aside)
            _note_told(told_metrics, logs, noted, run.engine().recorder)
            logs = _told(run, logs, weight, data)
            loss = _loss(run, model.optimizer)
            of_batch = [[scaled(each, factor) for each in gradients] for _, gradients, _ in aside]
            return of_batch, _numbers(logs), loss

        return one_step

    # One call for all gradients: an operation of its own takes 20 us for each.
    apply = tf.function(lambda *given: _apply(targets, *given), autograph=False)
    results = _results_of(model, told_metrics)

    def chosen(data: Any) -> tuple[Any, BatchWeights]:
        found = step_of(lambda _: run.gradients_put_aside())
        found.prepare(data, None)
        if (goes_on := run.engine().goes_on) is not None:
            if run.plan is None or run.plan.schedule.microbatches > 1:
                raise goes_on_after_update(goes_on)
            run.engine().goes_on = None
            found = step_of(run.updates_at_once)
        return found, BatchWeights(run, found)

    choice: list[tuple[Any, BatchWeights]] = []

    def train(data: Any) -> Logs:
        if not choice:
            choice.append(chosen(data))
        one_step, weights = choice[0]
        gradients, logs, _ = one_step(data, weights.of(data, _num_samples(data)))
        if (goes_on := run.engine().goes_on) is not None:  # in a batch of another shape than the first
            raise goes_on_after_update(goes_on)
        pairs = [
            [(None, 1) if each is None else each.sum_and_count() for each in group] for group in gradients
        ]
        if pairs:
            apply(
                [[total for total, _ in group] for group in pairs], [[n for _, n in group] for group in pairs]
            )
        _private.count_batch(model)
        return logs_of(results, logs, _num_samples(data))

    return _several(model, train)


def test_function(model: Any) -> Callable[[Iterator[Any]], Logs]:
    """Evaluates the next batch of an iterator, or the next few; gives the metrics."""

    run = keras_run()
    told_metrics: Logs = {}

    @step
    def one_step(data: Any, weight: Weight) -> Any:
        with _results_noted(model) as noted:
            logs = model.test_step(data)
        _note_told(told_metrics, logs, noted, run.engine().recorder)
        logs = _told(run, logs, weight, data)
        return _numbers(logs)

    results, weights = _results_of(model, told_metrics), BatchWeights(run, one_step)

    def test(data: Any) -> Logs:
        samples = _num_samples(data)
        return logs_of(results, one_step(data, weights.of(data, samples)), samples)

    return _several(model, test)


def predict_function(model: Any) -> Callable[[Any], Any]:
    """The outputs of the model for the next batch of an iterator, or the next few."""

    @step
    def one_step(data: Any) -> Any:
        return model.predict_step(data)

    def rows(batch: Any) -> Any:
        return tf.nest.map_structure(lambda output: output.merge(), one_step(batch))

    def predict(batches: Any) -> Any:
        if isinstance(batches, (list, tuple)):  # Keras 3 takes them from the iterator itself
            found = [rows(batch) for batch in batches]
        else:
            found = _each_of_next(model, batches, rows)
        return tf.nest.map_structure(lambda *each: tf.concat(each, 0), *found)

    return predict


def averaged_over_replicas(run: KerasRun, logs: Logs) -> Logs:
    """Numbers as means over replicas, so that callbacks decide alike on all ranks; collective."""
    if run.mesh.data == 1 or not run.averages_replicas or run.is_tracing or not logs:
        return logs
    return dict(zip(logs, run.means_over_replicas([float(each) for each in logs.values()]), strict=True))


def _several(model: Any, one: Callable[[Any], Logs]) -> Callable[[Iterator[Any]], Logs]:
    """As many batches as Keras asks for in one call: callbacks are called after the last."""
    return lambda iterator: _each_of_next(model, iterator, one)[-1]


def _each_of_next(model: Any, iterator: Iterator[Any], one: Callable[[Any], Any]) -> list[Any]:
    """What each of the next batches gives; the data may end behind the first."""
    found = [one(_next(iterator))]
    for _ in range(_private.steps_per_execution(model) - 1):
        try:
            data = _next(iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            break
        found.append(one(data))
    return found


def _next(iterator: Iterator[Any]) -> Any:
    """The next batch; what a data set may lack is None in it."""
    return tf.nest.map_structure(
        lambda each: None if isinstance(each, tf.experimental.Optional) else each, next(iterator)
    )


def _num_samples(data: Any) -> int:
    return int(next(each for each in tf.nest.flatten(data) if each is not None).shape[0])


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _told(run: KerasRun, logs: Any, weight: Weight, data: Any) -> Any:
    """What a step tells: of losses that are sums, means over the samples give the sum."""
    if weight is None or weight[0] != "sum":
        return logs
    return told_as_sums(run.engine().recorder, logs, weight[2] / _num_samples(data))


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _note_targets(
    targets: list[tuple[Any, list[Any]]], aside: list[tuple[Any, list[Any], list[Any]]]
) -> None:
    targets[:] = [(optimizer, variables) for optimizer, _, variables in aside]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _loss(run: KerasRun, optimizer: Any) -> Any:
    """The loss of the microbatch that is traced; None where it is unknown, or scaled for 16 bits.

    The run's record has it. What ``train_step`` gives as the loss is a mean over the epoch so far.
    """
    recorder = run.engine().recorder
    scales = isinstance(optimizer, tuple(kind for kind, _ in _private.loss_scale_classes()))
    return None if recorder is None or scales else recorder.target


def _apply(targets: list[tuple[Any, list[Any]]], sums: list[list[Any]], counts: list[list[int]]) -> None:
    """Gives optimizers the means of gradients."""
    for (optimizer, variables), group, each in zip(targets, sums, counts, strict=True):
        means = map(mean_of, group, each)
        optimizer.apply_gradients(zip(means, variables, strict=True))


def _numbers(logs: Any) -> Any:
    """What a step has to tell, as tensors."""
    if not isinstance(logs, Mapping):
        return tf.convert_to_tensor(logs)
    return {name: tf.convert_to_tensor(value) for name, value in _flat(logs)}


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _flat(logs: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Without the dictionaries inside: of Keras 3's compiled metrics, as ``m.result()`` gives them."""
    found: list[tuple[str, Any]] = []
    for name, value in logs.items():
        found += _flat(value) if isinstance(value, Mapping) else [(name, value)]
    return found


@contextmanager
def _results_noted(model: Any) -> Iterator[list[tuple[Any, Any]]]:
    """While it lasts, results of the model's metrics are collected, each with its metric.

    A step may tell one under another name: ``{"loss": self.total_loss_tracker.result()}``.
    """
    noted: list[tuple[Any, Any]] = []

    def noting(metric: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        def result(*args: Any, **kwargs: Any) -> Any:
            value = original(*args, **kwargs)
            noted.append((value, metric))
            return value

        return result

    with ExitStack() as stack:
        for metric in {id(each): each for each in model.metrics}.values():
            stack.enter_context(_private.replaced(metric, "result", partial(noting, metric)))
        yield noted


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _note_told(told: Logs, logs: Any, noted: Sequence[tuple[Any, Any]], recorder: Recorder | None) -> None:
    """Notes the metrics whose results a step tells, by the names under which it does; None for its loss.

    Keras has a metric of the name ``loss`` also where a step tells its loss itself, and leaves that out.
    """
    if isinstance(logs, Mapping):
        of_values: dict[int, Any] = {id(value): metric for value, metric in noted}
        of_values |= {id(loss): None for loss in ([] if recorder is None else recorder.losses)}
        told.update({name: of_values[id(value)] for name, value in logs.items() if id(value) in of_values})


def _results_of(model: Any, told: Logs) -> Callable[[], Any]:
    """Gives the values of the model's metrics, of this replica."""
    get = _private.keras_model_class().get_metrics_result

    def results() -> Logs:
        found = {name: value for name, value in get(model).items() if name not in told}
        return {**found, **{name: metric.result() for name, metric in told.items() if metric is not None}}

    function: Callable[[], Any] = tf.function(results, autograph=False)
    return function


def logs_of(results: Callable[[], Any], told: Any, num_samples: int) -> Logs:
    """The metrics after a batch; what is no metric is the mean over its samples of what the step has told."""
    if not isinstance(told, Mapping):
        return {"loss": _mean_over_samples(told, num_samples)}
    known = results()
    return {
        name: known[name] if name in known else _mean_over_samples(each, num_samples)
        for name, each in told.items()
    }


def _mean_over_samples(output: Any, num_samples: int) -> Any:
    sizes = microbatch_sizes(num_samples, len(output))
    if len(set(sizes)) == 1 or not output[0].dtype.is_floating:
        return output.reduce_mean()
    return tf.add_n([each * (size / num_samples) for each, size in zip(output, sizes, strict=True)])

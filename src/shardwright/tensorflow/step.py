"""The decorator that turns a function into a training or evaluation step."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from shardwright.runtime.step_function import parameters_of
from shardwright.tensorflow.batch import Arguments, Splitter
from shardwright.tensorflow.channels import call_in_turn
from shardwright.tensorflow.engine import Engine
from shardwright.tensorflow.keras_run import keras_run
from shardwright.tensorflow.outputs import Outputs


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    non_split_inputs: Sequence[str] = (),
    input_signature: Sequence[Any] | None = None,
) -> Any:
    """Makes a function run once for each microbatch, pipelined over the stages.

    The function is what ``tf.function`` takes: it calls the model, computes a loss, and asks for gradients of
    the model's variables by ``tf.GradientTape`` or ``tf.gradients``. Without gradients it evaluates. It is
    called from the training loop, eagerly or inside of a ``tf.function``. What it returns comes back as
    `StepOutput`, one tensor a microbatch, on every rank; a gradient is on the rank that holds its variable,
    and None elsewhere, as `optimizer.apply_gradients` takes it.

    Args:
        function: the step function.
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_signature: ``tf.TensorSpec`` for each positional argument; arguments are converted to its types.

    Raises:
        UsageError: there is no such argument.

    Example::

        @sw.step
        def train_step(images, labels):
            with tf.GradientTape() as tape:
                loss = loss_of(labels, model(images, training=True))
            return tape.gradient(loss, model.trainable_variables), loss
    """
    if function is None:
        return functools.partial(step, non_split_inputs=non_split_inputs, input_signature=input_signature)
    parameters = parameters_of(function, named=non_split_inputs)
    splitter = Splitter(
        names=parameters.names,
        further=parameters.further,
        non_split=frozenset(non_split_inputs),
        signature=input_signature,
    )
    return _callable(function, splitter)


def _callable(function: Callable[..., Any], splitter: Splitter) -> Any:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        engine = keras_run().engine()
        arguments = splitter(args, kwargs)
        if tf.executing_eagerly():
            flat, prepared = engine.run(function, arguments)
            return _packed(engine, prepared[0].outputs, flat, len(prepared))
        return _run_in_graph(engine, function, arguments)

    def prepare(*args: Any, **kwargs: Any) -> Any:
        """The trace of the step for a batch; makes the plan where there is none. Collective."""
        return keras_run().engine().prepare(function, splitter(args, kwargs))[0].trace

    def loss_reduction(*args: Any, **kwargs: Any) -> Any:
        """How the losses of the step rest on samples, with its trace; collective."""
        return keras_run().engine().loss_reduction(function, splitter(args, kwargs))

    wrapped: Any = tf.autograph.experimental.do_not_convert(run)
    wrapped.prepare, wrapped.loss_reduction = prepare, loss_reduction
    return wrapped


def _run_in_graph(engine: Engine, function: Callable[..., Any], arguments: Arguments) -> Any:
    """One operation of the caller's ``tf.function``, which runs the step when it comes to it."""
    prepared = engine.prepare(function, arguments)
    first, rank = prepared[0], keras_run().pipeline_rank
    outputs: Outputs = first.outputs
    count = engine.num_microbatches_of(arguments)
    each = prepared if len(prepared) == count else prepared * count
    symbolic = outputs.specs([one.trace.function.outputs for one in each], rank=rank)

    def now(*given: Any) -> list[Any]:
        tensors = given[: len(arguments.tensors)]
        flat, _ = engine.run(function, arguments.with_tensors(tensors), expected=count)
        return flat

    # Handles of variables come along, so that TensorFlow runs the step after writes that come before it in
    # the caller's function, and before those that follow.
    handles = [handle for one in prepared for handle in one.trace.variables]
    handles = list({id(handle): handle for handle in handles}.values())
    flat = call_in_turn(now, [*arguments.tensors, *handles], [tensor.dtype for tensor in symbolic])
    for tensor, like in zip(flat, symbolic, strict=True):
        tensor.set_shape(like.shape)
    return _packed(engine, outputs, flat, count)


def _packed(engine: Engine, outputs: Outputs, flat: Sequence[Any], num_microbatches: int) -> Any:
    rank = keras_run().pipeline_rank
    return outputs.pack(flat, num_microbatches, rank=rank, are_means=engine.averages_replicas)

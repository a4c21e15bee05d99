"""Function graphs of TensorFlow: their tracing, and calls of concrete functions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.autograph.core import ag_ctx as autograph_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import control_flow_util, gradients_util

# Of these the executor makes operations that the one for a single thread does not take.
_CONTROL_FLOW = frozenset("While StatelessWhile If StatelessIf Case StatelessCase".split())


def is_for_xla() -> bool:
    """Whether the graph that is being made is for XLA, which later fails with other words."""
    found: bool = control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph())
    return found


def direct_call(function: Any) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """A concrete function, called eagerly on flat tensors that fit, without gradients.

    ``function(*tensors)`` binds arguments to a signature, looks for tapes and packs results, which takes a
    tenth of a millisecond. `execute.execute` is what it ends in. Where a rank computes with one thread,
    TensorFlow's executor for a single thread runs the operations in the calling one: others would just wait
    for it, and be woken for each. It takes no loops and conditions.
    """
    name, captured = function.name.decode(), list(function.captured_inputs)
    count, now = len(function.outputs), context.context()
    is_single = tf.config.threading.get_intra_op_parallelism_threads() == 1
    in_this_thread = is_single and not _has_control_flow(function.graph.as_graph_def())
    with tf.experimental.function_executor_type("SINGLE_THREADED_EXECUTOR" if in_this_thread else ""):
        attrs = tuple(chain(*now.function_call_options.as_attrs().items()))

    def call(tensors: Sequence[Any]) -> Sequence[Any]:
        given = [*tensors, *captured]
        made: Sequence[Any] = execute.execute(name, num_outputs=count, inputs=given, attrs=attrs, ctx=now)
        return made

    call.holds = function  # type: ignore[attr-defined]
    return call


def _has_control_flow(definition: Any) -> bool:
    """Whether a graph has loops or conditions, also in the functions that it calls."""
    bodies = {body.signature.name: body.node_def for body in definition.library.function}
    pending = [definition.node]
    seen: set[str] = set()
    while pending:
        for node in pending.pop():
            if node.op in _CONTROL_FLOW:
                return True
            called = [node.op, *(attr.func.name for attr in node.attr.values())]
            called += [each.name for attr in node.attr.values() for each in attr.list.func]
            for name in (bodies.keys() & called) - seen:
                seen.add(name)
                pending.append(bodies[name])
    return False


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute by what `make` makes of it, for as long as the context lasts."""
    own = name in vars(owner)
    original = getattr(owner, name)
    made = make(original)
    # AutoGraph would convert what it comes upon inside of a step function, with no use and not always right.
    # It goes on with what is called in there, so `do_not_convert` is too much.
    setattr(owner, name, autograph.autograph_artifact(made) if callable(made) else made)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def added(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives a class an attribute that it lacks, for as long as the context lasts."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)


# Frames of these are not the user's.
_LIBRARIES = ("/tensorflow/", "/keras/src/", "/tf_keras/src/", "/shardwright/")


@contextmanager
def operations_told(tell: Callable[[Any, Any], None]) -> Iterator[None]:
    """Calls ``tell(graph, operation)`` for every operation that a function graph gets.

    `FuncGraph._create_op_internal` makes all of them. Names and tracebacks alone do not tell the layer.
    """

    def make(original: Any) -> Any:
        def create(self: Any, *args: Any, **kwargs: Any) -> Any:
            operation = original(self, *args, **kwargs)
            tell(self, operation)
            return operation

        return create

    with replaced(func_graph.FuncGraph, "_create_op_internal", make):
        yield


@contextmanager
def gradients_told(begin: Callable[[Any], None], end: Callable[[Any, Any], None]) -> Iterator[None]:
    """Calls ``begin(target)`` and ``end(gradients, sources)`` around the making of gradients.

    `gradients_util._GradientsHelper` is behind `tf.gradients` and the gradients of loops;
    `GradientTape.gradient` is public, but nobody is told of its calls. ``end(None, None)`` follows an error.
    """

    def around(position: int) -> Callable[[Any], Any]:
        def make(original: Any) -> Any:
            def asked(*args: Any, **kwargs: Any) -> Any:
                result = sources = None
                begin(_given(args, kwargs, position - 1, "ys", "target"))
                try:
                    result = original(*args, **kwargs)
                    sources = _given(args, kwargs, position, "xs", "sources")
                finally:
                    end(result, sources)
                return result

            return asked

        return make

    with (
        replaced(gradients_util, "_GradientsHelper", around(1)),
        replaced(tf.GradientTape, "gradient", around(2)),
    ):
        yield


def _given(args: Sequence[Any], kwargs: Mapping[str, Any], position: int, *names: str) -> Any:
    """An argument of a call, by one of its names or by its position."""
    found = next((kwargs[name] for name in names if name in kwargs), None)
    return found if found is not None else args[position]


@contextmanager
def outside_of_functions() -> Iterator[None]:
    """Leaves the ``tf.function`` that is being traced, and lets tapes record.

    `tf.init_scope` leaves it, and stops tapes, which a step function needs.
    """
    if tf.executing_eagerly():
        yield
        return
    with tf.init_scope():
        pywrap_tfe.TFE_Py_TapeSetRestartOnThread()
        try:
            yield
        finally:
            pywrap_tfe.TFE_Py_TapeSetStopOnThread()


@contextmanager
def functions_inlined() -> Iterator[None]:
    """Puts the operations of the user's own ``tf.function`` objects into the graph that calls them.

    A function in a graph is one operation, so the layers inside would have no stages. Those of Keras and
    TensorFlow, such as the loops of LSTM, stay, and so do those that XLA compiles. AutoGraph converts the
    others as they ask for, also in layers of Keras 3, which it does not convert.
    """

    def make(original: Any) -> Any:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            own = self.python_function
            module = getattr(own, "__module__", None) or ""
            if self._jit_compile or module.partition(".")[0] in ("keras", "tf_keras", "tensorflow"):
                return original(self, *args, **kwargs)
            status = autograph_ctx.Status.ENABLED if self._autograph else autograph_ctx.Status.DISABLED
            return autograph.tf_convert(own, autograph_ctx.ControlStatusCtx(status))(*args, **kwargs)

        return call

    with replaced(polymorphic_function.Function, "__call__", make):
        yield


def give_instead(taker: Any, tensor: Any, other: Any) -> None:
    """Has an operation take another tensor in the place of one; `Operation._update_input` does so."""
    for position, given in enumerate(list(taker.inputs)):
        if given is tensor:
            taker._update_input(position, other)


def is_stateful(operation: Any) -> bool:
    """Whether an operation does more than compute its outputs, or draws random numbers."""
    return bool(operation.op_def.is_stateful)


def line_of(operation: Any) -> str:
    """The innermost line of the user's that made an operation; `Operation.traceback` keeps them."""
    for frame in reversed(list(operation.traceback or ())):
        if not any(library in frame.filename for library in _LIBRARIES):
            return f"{frame.filename}:{frame.lineno}"
    return "the step function"

"""Calls of concrete functions, without what TensorFlow does around them; attributes of others, replaced."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager import context, execute

# Of these the executor makes operations that the one for a single thread does not take.
_CONTROL_FLOW = frozenset("While StatelessWhile If StatelessIf Case StatelessCase".split())


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

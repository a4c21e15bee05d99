"""Gradients that are rows of a variable, as those of lookups: which of them come as dense tensors.

The rows of all microbatches together are those of the whole batch, if each sample looks up its own, as token
embeddings have it::

    one process   [ rows of samples 0 .. 7 ]
    microbatches  [ 0, 1 ] [ 2, 3 ] [ 4, 5 ] [ 6, 7 ]

Where rows follow from no sample (``positions(tf.range(length))``), one process has each of them once, and
four microbatches have it four times. That is not the same: Adam of Keras 3 squares each row for itself, and
clipping takes the norm of the rows as they are. As dense tensors they are added up, as in one process.
"""

from typing import Any

import numpy as np
import tensorflow as tf

from shardwright.tensorflow import _private

__all__ = ["dense", "dense_if_fixed"]

_NO_VALUES = (tf.resource, tf.variant)


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def dense(value: Any) -> Any:
    """A gradient as a dense tensor; all else as it is."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def dense_if_fixed(value: Any) -> Any:
    """The same for a gradient whose rows are alike in all microbatches, and each is there once."""
    if not isinstance(value, tf.IndexedSlices):
        return value
    rows = _fixed(value.indices)
    is_fixed = rows is not None and np.unique(rows).size == rows.size
    return tf.convert_to_tensor(value) if is_fixed else value


def _fixed(tensor: Any) -> Any:
    """The value of a symbolic tensor that follows from constants alone; None for another."""
    graph = tensor.graph
    # Tensors of the script; variables are there as resources.
    held = {inner.name: outer for outer, inner in graph.captures if outer.dtype not in _NO_VALUES}
    pending, seen = [tensor.op], set[str]()
    while pending:
        operation = pending.pop()
        if operation.name in seen:
            continue
        seen.add(operation.name)
        is_given = operation.type == "Placeholder" and operation.outputs[0].name not in held
        if is_given or _private.is_stateful(operation):
            return None
        pending += [each.op for each in operation.inputs]
    definition = tf.compat.v1.graph_util.extract_sub_graph(graph.as_graph_def(), [tensor.op.name])

    def again() -> Any:
        known = {name: tf.identity(each) for name, each in held.items() if name.partition(":")[0] in seen}
        return tf.import_graph_def(definition, input_map=known, return_elements=[tensor.name])

    with tf.init_scope():
        (value,) = tf.compat.v1.wrap_function(again, [])()
        return value.numpy()

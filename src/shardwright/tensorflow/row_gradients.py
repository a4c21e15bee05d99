"""Gradients that are rows of a variable, as those of lookups: how the rows of microbatches come together.

The optimizer gets the rows that one process has: Adam of Keras 3 squares each row for itself, and clipping
takes the norm of the rows as they are. Where each sample looks up its own, as token embeddings have it, the
rows of all microbatches stand behind each other. Where rows follow from no sample, as those of positions, one
process has them once, and the microbatches' are added up, row by row::

                  tokens of samples 0 .. 7        positions(tf.range(length))
    one process   [ rows of samples 0 .. 7 ]      [ rows ]
    microbatches  [ 0, 1 ] [ 2, 3 ] [ 4, 5 ] ..   [ rows ] + [ rows ] + [ rows ] ..

Equal rows of two microbatches tell no difference: token types that are all zero are the samples' own. The
number of rows does: a trace with the whole batch has as many rows of positions, and more of token types.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from shardwright.tensorflow.trace import Trace

__all__ = ["dense", "fixed_rows", "rows_together"]


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def dense(value: Any) -> Any:
    """A gradient as a dense tensor; all else as it is."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


def fixed_rows(
    trace: Trace, whole: Callable[[], Trace], *, samples: tuple[int, int] | None = None
) -> frozenset[int]:
    """The outputs, by their number, that are rows of which the whole batch has as many as a microbatch.

    Args:
        trace: of a microbatch.
        whole: gives that of the whole batch; called where there are rows at all.
        samples: of the microbatch, and of the batch; None where they are not known.
    """
    rows = _num_rows(trace)
    if not rows:
        return frozenset()
    try:
        of_batch = _num_rows(whole())
    except Exception as error:  # whatever it is: the model may be written for microbatches alone
        _warn("cannot be compared to that of the whole batch, for which the step function fails", error)
        return frozenset()
    found = set()
    for at, count in rows.items():
        others = of_batch.get(at)
        if count is None or others is None:
            continue
        if count == others:
            found.add(at)
        elif samples is not None and count * samples[1] != others * samples[0]:
            _warn(
                f"has {count} rows for {samples[0]} samples and {others} for {samples[1]}",
                "some are the samples', others are not: give these a table of their own",
            )
    return frozenset(found)


def rows_together(parts: Sequence[Any], *, scale: float, are_fixed: bool = False) -> Any:
    """The rows of all microbatches, times a number.

    Args:
        parts: the gradient of each microbatch.
        scale: what values are multiplied by.
        are_fixed: the whole batch has as many rows as each microbatch: see `fixed_rows`. They are added up
            if they are rows of the same indices, which random ones are not.
    """
    values, indices = [part.values for part in parts], [part.indices for part in parts]

    def added() -> Any:
        return tf.add_n(values), indices[0]

    def behind() -> Any:
        return tf.concat(values, 0), tf.concat(indices, 0)

    if are_fixed and len(parts) > 1:
        same = tf.reduce_all(tf.equal(tf.stack(indices[1:]), indices[0]))
        total, rows = tf.cond(same, added, behind)
    else:
        total, rows = behind()
    return tf.IndexedSlices(total * tf.cast(scale, total.dtype), rows, parts[0].dense_shape)


def _num_rows(trace: Trace) -> dict[int, int | None]:
    """How many rows the outputs have that are rows; None where that follows from values."""
    outputs = tf.nest.flatten(trace.function.structured_outputs)
    rows = {at: output for at, output in enumerate(outputs) if isinstance(output, tf.IndexedSlices)}
    return {at: output.indices.shape[0] for at, output in rows.items()}


def _warn(fact: str, remedy: object) -> None:
    warnings.warn(
        f"the gradient of a lookup {fact} ({remedy}). Its rows come once for each microbatch, so Adam of "
        "Keras 3 and clipping, which take each row for itself, may train otherwise than in one process. With "
        "microbatches set to 1 they do not.",
        stacklevel=3,
    )

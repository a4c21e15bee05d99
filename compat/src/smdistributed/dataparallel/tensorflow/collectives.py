"""Collectives of TensorFlow's tensors over the ranks with different data, also inside of ``tf.function``.

There a collective is one call of Python; they run in the order in which they are written.
"""

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import tensorflow as tf
from torch import Tensor

from shardwright.errors import UsageError
from shardwright.run.context import context, is_initialized
from shardwright.tensorflow.channels import call_in_turn, to_tensorflow, to_torch
from shardwright.tensorflow.keras_run import KerasRun
from shardwright.tensorflow.variables import tf_variable
from smdistributed.dataparallel.data_ranks import data_ranks
from smdistributed.dataparallel.tensorflow.compression import Compression


class Reduction(Enum):
    """How one tensor is made of those of all ranks."""

    AVERAGE = "average"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"


def reduced(
    tensor: Any, reduction: Reduction = Reduction.AVERAGE, *, compression: Any = Compression.none
) -> Any:
    """A tensor, or the rows of a sparse one, over all ranks; None for None."""
    return reduced_each([tensor], reduction, compression=compression)[0]


def reduced_each(
    tensors: Sequence[Any],
    reduction: Reduction = Reduction.AVERAGE,
    *,
    compression: Any = Compression.none,
    sparse_as_dense: bool = False,
) -> list[Any]:
    """Tensors over all ranks, in one collective.

    Args:
        tensors: None for those that this rank does not hold, and for those without gradient.
        sparse_as_dense: rows of gradients become dense tensors first; else the rows of all ranks are joined.
    """
    found: list[Any] = list(tensors)
    dense: dict[int, Any] = {}
    for position, tensor in enumerate(found):
        if isinstance(tensor, tf.IndexedSlices) and not sparse_as_dense:
            found[position] = _rows_of_all(tensor, reduction)
        elif tensor is not None:
            dense[position] = tf.convert_to_tensor(tensor)
    if dense:
        sent = [compression.compress(tensor) for tensor in dense.values()]
        made = _reduced_dense([tensor for tensor, _ in sent], reduction)
        for (position, tensor), (_, known), result in zip(dense.items(), sent, made, strict=True):
            result.set_shape(tensor.shape)
            found[position] = compression.decompress(result, known)
    return found


def broadcast(tensors: Sequence[Any], root: int) -> list[Any]:
    """The tensors of one rank, on all."""
    given = [tf.convert_to_tensor(tensor) for tensor in tensors]
    if not given:
        return []
    made: list[Any] = _in_order(
        lambda each: data_ranks().broadcast(each, root), given, lambda gradients: _sums_at(gradients, root)
    )
    for result, tensor in zip(made, given, strict=True):
        result.set_shape(tensor.shape)
    return made


def _sums_at(tensors: Sequence[Any], root: int) -> list[Any]:
    """The sums over all ranks at one of them, and zeros elsewhere."""
    made: list[Any] = _in_order(
        lambda each: [data_ranks().sum_at(tensor, root) for tensor in each],
        tensors,
        lambda gradients: broadcast(gradients, root),
    )
    return made


def broadcast_variables(variables: Sequence[Any], root: int) -> None:
    """Gives variables the values of one rank; those that other ranks of the pipeline hold are left out."""
    here = variables_here(variables)
    for variable, value in zip(here, broadcast(here, root), strict=True):
        variable.assign(value)


def variables_here(variables: Sequence[Any]) -> list[Any]:
    """TensorFlow's own variables, without those that other ranks of the pipeline hold."""
    run = _keras_run()
    return [
        tf_variable(variable)
        for variable in variables
        if run is None or not run.variables.is_remote(variable)
    ]


def gathered(tensor: Any) -> Any:
    """The rows of all ranks, by rank, which may have different numbers of them."""
    given = tf.convert_to_tensor(tensor)
    (made,) = _in_order(
        lambda each: [data_ranks().gathered(each[0])],
        [given],
        lambda gradients: [_own_rows(gradients[0], tf.shape(given))],
    )
    made.set_shape([None, *given.shape[1:]] if given.shape.rank else [None])
    return made


def _own_rows(tensor: Any, shape: Any) -> Any:
    """The sum over all ranks of a tensor as `gathered` makes it, and of it this rank's rows."""
    made, _ = _in_order(
        lambda each: [data_ranks().own_rows(each[0], each[1].tolist()), each[1]],
        [tensor, shape],
        lambda gradients: [gathered(gradients[0]), None],
    )
    return made


def _rows_of_all(slices: Any, reduction: Reduction) -> Any:
    if reduction not in (Reduction.AVERAGE, Reduction.SUM):
        raise UsageError(
            f"a sparse tensor has no {reduction.value} over ranks. Make it dense: tf.convert_to_tensor."
        )
    values = slices.values
    if reduction is Reduction.AVERAGE:
        values = values / tf.cast(data_ranks().size, values.dtype)
    return tf.IndexedSlices(gathered(values), gathered(slices.indices), slices.dense_shape)


def _reduced_dense(tensors: Sequence[Any], reduction: Reduction) -> list[Any]:
    def back(gradients: Sequence[Any]) -> list[Any]:
        if reduction not in (Reduction.AVERAGE, Reduction.SUM):
            raise UsageError(
                f"the {reduction.value} over ranks has no gradient. Take it of tf.stop_gradient(tensor)."
            )
        return _reduced_dense(gradients, reduction)

    made: list[Any] = _in_order(lambda given: _reduce(given, reduction), tensors, back)
    return made


def _reduce(given: list[Tensor], reduction: Reduction) -> list[Tensor]:
    ranks = data_ranks()
    if reduction in (Reduction.AVERAGE, Reduction.SUM):
        return ranks.sums(given, divisor=ranks.size if reduction is Reduction.AVERAGE else 1)
    if reduction is Reduction.PRODUCT:
        return [ranks.product(tensor) for tensor in given]
    return [ranks.extreme(tensor, largest=reduction is Reduction.MAX) for tensor in given]


def _keras_run() -> KerasRun | None:
    run = context() if is_initialized() else None
    return run if isinstance(run, KerasRun) else None


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def _in_order(
    collective: Callable[[list[Tensor]], list[Tensor]],
    tensors: Sequence[Any],
    back: Callable[[Sequence[Any]], list[Any]],
) -> list[Any]:
    """Runs a collective, behind those that were written before it.

    Args:
        back: makes the gradients of the tensors from those of what the collective gives.
    """
    run = _keras_run()
    if run is not None and run.is_tracing:
        raise UsageError(
            "a collective over replicas stands inside of a step function, which runs once for each "
            "microbatch. Return what it is to have, and call it on the reduced result: "
            "[hvd.allreduce(g.accumulate()) for g in gradients]."
        )

    def now(*given: Any) -> list[Any]:
        made = collective([to_torch(tensor).contiguous() for tensor in given])
        return [to_tensorflow(tensor) for tensor in made]

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def over_ranks(*given: Any) -> tuple[list[Any], Callable[..., list[Any]]]:
        if tf.executing_eagerly():
            made = now(*given)
        else:
            made = call_in_turn(now, given, [tensor.dtype for tensor in given])
        return made, lambda *gradients: back([tf.convert_to_tensor(each) for each in gradients])

    return list(over_ranks(*tensors))

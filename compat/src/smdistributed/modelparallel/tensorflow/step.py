"""``@smp.step``."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

import shardwright.tensorflow as sw
from shardwright.errors import UsageError


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    non_split_inputs: Sequence[str] | None = None,
    input_split_axes: Mapping[str, int] | None = None,
    input_signature: Sequence[Any] | None = None,
    **tf_function_options: Any,
) -> Any:
    """Makes a function run once for each microbatch; see `shardwright.tensorflow.step`.

    Args:
        input_split_axes: name of an argument -> axis along which it is cut: 0, the first.
        tf_function_options: others of ``tf.function``. They change nothing: they tune how it traces, and a
            step is traced once for each shape of a microbatch.

    Raises:
        UsageError: there is no such option, or XLA is to compile the step, or the axis is another one.
    """
    if function is None:
        return functools.partial(
            step,
            non_split_inputs=non_split_inputs,
            input_split_axes=input_split_axes,
            input_signature=input_signature,
            **tf_function_options,
        )
    _check(tf_function_options, input_split_axes or {})
    return sw.step(function, non_split_inputs=tuple(non_split_inputs or ()), input_signature=input_signature)


def _check(options: Mapping[str, Any], axes: Mapping[str, int]) -> None:
    known = inspect.signature(tf.function).parameters
    for name, value in options.items():
        if name not in known and name != "detach_outputs":
            raise UsageError(f"smp.step has no option {name}: it takes those of tf.function.")
        if name in ("jit_compile", "experimental_compile") and value:
            raise UsageError(
                f"{name}: XLA would compile the step function as one piece, and it is cut into stages. "
                "Leave it out; a layer's own call may be a tf.function with jit_compile=True."
            )
    for name, axis in axes.items():
        if axis != 0:
            raise UsageError(
                f"input_split_axes cuts {name} along axis {axis}, and with TensorFlow arguments are cut "
                "along axis 0. Transpose it before the step, and back inside of it."
            )

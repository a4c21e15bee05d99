"""The seams to PyTorch's transport, which carries tensors without a copy, and to graphs that call Python.

Calls in the graph of a ``tf.function`` come in the order in which they are written. What talks to other ranks
must do so in the same order on all of them. TensorFlow orders what takes the handle of one variable, through
conditions and loops as well, and nothing else.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch
from torch import Tensor
from torch.utils import dlpack

from shardwright.comm.transport import Receipt, Transport
from shardwright.errors import UsageError
from shardwright.runtime import action_loop
from shardwright.runtime.homes import Crossing
from shardwright.tensorflow import _private


def to_torch(tensor: Any) -> Tensor:
    """The same memory as a tensor of PyTorch.

    Raises:
        UsageError: it is no tensor of numbers; TensorFlow would end the process.
    """
    if tensor.dtype in (tf.string, tf.resource, tf.variant):
        raise UsageError(
            f"a tensor of type {tensor.dtype.name} was to go to another rank, and numbers and booleans alone "
            "can. Send them in its place, such as the tokens of a text; small texts can go as objects "
            "(hvd.broadcast_object)."
        )
    found: Tensor = dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    return found


def to_tensorflow(tensor: Tensor) -> Any:
    """The same memory as a tensor of TensorFlow; nobody may write to it any more."""
    return tf.experimental.dlpack.from_dlpack(tensor.contiguous().__dlpack__())


class TensorChannels:
    """See `shardwright.runtime.action_loop.Channels`."""

    def __init__(self, transport: Transport, device: torch.device):
        self._transport = transport
        self._device = device

    def post_receive(self, crossing: Crossing, source: int) -> action_loop.Receipt:
        """Announces that the next tensor from a rank can be taken."""
        dtype = getattr(torch, crossing.spec.dtype)
        shape = crossing.spec.shape
        return _Arriving(self._transport.post_receive(shape, source, dtype=dtype, device=self._device))

    def send(self, tensor: Any, crossing: Crossing, target: int) -> None:
        """Starts sending a tensor to a rank."""
        self._transport.send(to_torch(tensor), target)


class _Arriving:
    """A receive of a tensor that becomes TensorFlow's when it is there."""

    def __init__(self, receipt: Receipt):
        self._receipt = receipt

    def wait(self) -> Any:
        return to_tensorflow(self._receipt.wait())


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def call_in_turn(
    function: Callable[..., Sequence[Any]], tensors: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Calls a function of tensors when the graph comes to it, behind the calls that are written before it."""

    if _private.is_for_xla():
        raise UsageError(
            "a function with jit_compile=True calls other ranks, which XLA cannot compile. Set "
            "jit_compile=False, in model.compile(...) or in tf.function(...)."
        )

    def now(*given: Any) -> list[Any]:
        return list(function(*given[: len(tensors)]))

    # A graph of TensorFlow 1 cannot take the handle, and has one call.
    turn = [_turn().handle] if tf.inside_function() else []
    made = tf.py_function(now, [*tensors, *turn], list(dtypes))
    # Without results it is an operation.
    return list(made) if isinstance(made, (list, tuple)) else []


@functools.cache
def _turn() -> Any:
    """The variable whose handle each call takes."""
    with tf.init_scope():
        return tf.Variable(0, trainable=False, name="turn")

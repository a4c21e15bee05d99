"""Moves tensors of TensorFlow between ranks: PyTorch's transport carries them, without a copy on the way."""

from typing import Any

import tensorflow as tf
import torch
from torch import Tensor
from torch.utils import dlpack

from shardwright.comm.messages.transport import Receipt, Transport
from shardwright.runtime import messages
from shardwright.runtime.crossings import Crossing

__all__ = ["TensorChannels", "to_tensorflow", "to_torch"]


def to_torch(tensor: Any) -> Tensor:
    """The same memory as a tensor of PyTorch."""
    found: Tensor = dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))
    return found


def to_tensorflow(tensor: Tensor) -> Any:
    """The same memory as a tensor of TensorFlow; nobody may write to it any more."""
    return tf.experimental.dlpack.from_dlpack(tensor.contiguous().__dlpack__())


class TensorChannels:
    """See `shardwright.runtime.messages.Channels`."""

    def __init__(self, transport: Transport, device: torch.device):
        self._transport = transport
        self._device = device

    def post_receive(self, crossing: Crossing, source: int) -> messages.Receipt:
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

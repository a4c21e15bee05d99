"""Sends PyTorch tensors between pipeline ranks, and keeps their memory layout."""

import torch
from torch import Tensor

from shardwright.comm.transport import Receipt, Transport
from shardwright.runtime import messages
from shardwright.runtime.crossings import Crossing
from shardwright.torch.pytorch.tensors import Order, from_memory_order, in_memory_order

__all__ = ["TensorChannels"]


class TensorChannels:
    """See `shardwright.runtime.messages.Channels`.

    Args:
        transport: to the other ranks of the pipeline.
        device: where received tensors are put.
    """

    def __init__(self, transport: Transport, device: torch.device):
        self._transport = transport
        self._device = device

    def post_receive(self, crossing: Crossing, source: int) -> messages.Receipt:
        """Announces that the next tensor from a rank can be taken."""
        dtype = getattr(torch, crossing.spec.dtype)
        receipt = self._transport.post_receive(
            crossing.message_shape, source, dtype=dtype, device=self._device
        )
        return receipt if crossing.order is None else _Reordered(receipt, crossing.order)

    def send(self, tensor: Tensor, crossing: Crossing, target: int) -> None:
        """Starts sending a tensor to a rank."""
        self._transport.send(in_memory_order(tensor, crossing.order), target)


class _Reordered:
    """A receive of a tensor whose dims are sent in the order of memory."""

    def __init__(self, receipt: Receipt, order: Order):
        self._receipt = receipt
        self._order = order

    def wait(self) -> Tensor:
        return from_memory_order(self._receipt.wait(), self._order)

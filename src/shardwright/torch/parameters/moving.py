"""Moves a model to the device of its rank."""

import itertools

import torch
from torch import nn

from shardwright.torch.pytorch.functions import RELEASED

__all__ = ["move_to"]


def move_to(model: nn.Module, device: torch.device) -> None:
    """Moves the parameters and buffers whose values this rank has; the script's references to them hold.

    `nn.Module.to` would touch those of other ranks, and make new buffers.
    """
    moved = set()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_meta or hasattr(tensor, RELEASED) or tensor.device == device:
            continue
        gradient = tensor.grad
        if gradient is not None:
            tensor.grad = None
        tensor.data = tensor.data.to(device)
        moved.add(id(tensor))
        if gradient is not None:
            tensor.grad = gradient.to(device)
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and all(id(each) in moved for each in module.parameters(False)):
            module.flatten_parameters()  # cuDNN wants them in one piece of memory

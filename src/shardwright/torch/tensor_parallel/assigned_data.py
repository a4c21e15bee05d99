"""``p.data = value``, where every rank has the whole parameter, and the value is divided.

PyTorch gives the parameter the value's memory, without a look at its class; a divided tensor has none of its
own, and the next operation on the parameter ended the process. Scripts assign so in averages of weights, and
in `torch.nn.utils.vector_to_parameters`.
"""

from typing import Any

import torch
from torch import Tensor

from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor, whole

__all__ = ["gather_assigned_data"]

_DATA: Any = torch.Tensor.data


def _assign(tensor: Tensor, value: Tensor) -> None:
    if isinstance(value, DividedTensor) and not isinstance(tensor, DividedTensor):
        value = whole(value.detach()).clone()  # what was gathered may be kept for others
    _DATA.__set__(tensor, value)


def gather_assigned_data() -> None:
    """From now on, a whole tensor takes all elements of what is assigned to its `data`."""
    torch.Tensor.data = property(_DATA.__get__, _assign)  # type: ignore[assignment]

"""Traces operations on CPUs as accelerators compute them.

On accelerators PyTorch fuses attention with its dropout, and dropout is one kernel with a mask of a byte per
element. A CPU trace would see scores that no accelerator writes, and masks four times as large: Hugging
Face's GPT-2 took twice the memory.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["OnAccelerators"]

_DROPOUT = 4  # its position among the arguments of attention


class OnAccelerators(TorchFunctionMode):
    """While it is active, operations that differ there are traced as accelerators compute them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:  # its dropout costs nothing where it is fused
            args = (*args[:_DROPOUT], 0.0, *args[_DROPOUT + 1 :]) if len(args) > _DROPOUT else args
            kwargs = {name: value for name, value in kwargs.items() if name != "dropout_p"}
        if func is F.dropout:
            return _dropout(*args, **kwargs)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if inplace:
        return F.dropout(input, p, training, inplace=True)
    return torch.native_dropout(input, p, training)[0]

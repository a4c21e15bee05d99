"""Traces operations on CPUs as accelerators compute them.

On accelerators PyTorch fuses attention with its dropout, and dropout is one kernel with a mask of a byte per
element. A CPU trace would see scores that no accelerator writes, and masks four times as large: Hugging
Face's GPT-2 took twice the memory.
"""

from contextlib import ExitStack
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.torch.attention.kernels import traced_for_accelerators

__all__ = ["OnAccelerators"]

_DROPOUT = 4  # its position among the arguments of attention


class OnAccelerators(TorchFunctionMode):
    """While it is active, operations that differ there are traced as accelerators compute them."""

    def __init__(self) -> None:
        super().__init__()
        self._attention = ExitStack()

    def __enter__(self) -> Self:
        self._attention.enter_context(traced_for_accelerators())
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        self._attention.close()

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

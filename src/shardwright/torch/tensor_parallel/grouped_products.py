"""Shapes of grouped products in all types: their kernel without data refuses those of more than 16 bits.

Mixtures of experts multiply by all experts at once, on CPUs in 32 bits, too.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.torch._private import FakeTensor
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

__all__ = ["GroupedProductsOfAllTypes", "grouped_product_without_data"]

_GROUPED_PRODUCT = torch.ops.aten._grouped_mm.default


def grouped_product_without_data(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Tensor | None:
    """An empty result of a grouped product; None for other operations, and where the usual kernel will do."""
    if func is not _GROUPED_PRODUCT or args[0].dtype == torch.bfloat16:
        return None
    if not (args[0].is_meta or isinstance(args[0], FakeTensor)):
        return None
    left, right = args[:2]
    groups = args[2] if len(args) > 2 else kwargs.get("offs")
    shape = [left.shape[-2], right.shape[-1]]
    if left.dim() == right.dim():
        shape = [left.shape[0] if groups is None else groups.shape[0], *shape]
    return torch.empty(shape, dtype=kwargs.get("out_dtype") or left.dtype, device=left.device)


class GroupedProductsOfAllTypes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside a mode of tensors without data: gives grouped products of all types their results."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DividedTensor in types:
            return NotImplemented  # its parts come by
        found = grouped_product_without_data(func, args, kwargs or {})
        return func(*args, **(kwargs or {})) if found is None else found

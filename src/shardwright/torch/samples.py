"""Stand-ins for the arguments and weights of a call: random data of the right shapes."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["copy_of_module", "random_like"]


def random_like(leaf: Any, device: torch.device) -> Any:
    """Random numbers of the same shape and type; zeros for whole numbers, which may be indices."""
    if not isinstance(leaf, Tensor):
        try:
            return copy.deepcopy(leaf)
        except Exception:
            return leaf
    if leaf.dtype is torch.bool:
        return torch.ones(leaf.shape, dtype=torch.bool, device=device)
    if not leaf.is_floating_point() and not leaf.is_complex():
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    tensor = torch.randn(leaf.shape, dtype=leaf.dtype, device=device)
    return tensor.requires_grad_() if leaf.requires_grad else tensor


def copy_of_module(
    module: nn.Module, device: torch.device, *, originals: Mapping[int, Tensor] | None = None
) -> nn.Module:
    """A copy with weights of its own: random where the module has none.

    Args:
        module: any module.
        device: where the copy goes.
        originals: id of a stand-in among its parameters and buffers -> the tensor that it stands for.
    """
    memo: dict[int, Any] = {}
    for identifier, tensor in (originals or {}).items():
        memo[identifier] = _own(tensor, device)
    twin = copy.deepcopy(module, memo)
    for sub in twin.modules():
        for registry in (sub._parameters, sub._buffers):
            for key, own in registry.items():
                if own is not None and own.device != device:
                    registry[key] = _own(own, device)  # type: ignore[assignment]
    return twin


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; random numbers for a tensor without memory."""
    if not tensor.is_meta:
        own = tensor.detach().to(device, copy=True)
    elif tensor.is_floating_point():
        own = torch.randn(tensor.shape, dtype=tensor.dtype, device=device) * 0.02
    else:
        own = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(own, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own

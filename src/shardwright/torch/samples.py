"""Stand-ins for the arguments and weights of a call: random data of the right shapes."""

import copy
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


def copy_of_module(module: nn.Module, device: torch.device) -> nn.Module:
    """A copy with weights of its own: random where the module has none."""
    twin = copy.deepcopy(module)
    if any(p.is_meta for p in (*twin.parameters(), *twin.buffers())):
        twin = twin.to_empty(device=device)
        with torch.no_grad():
            for tensor in (*twin.parameters(), *twin.buffers()):
                if tensor.is_floating_point():
                    tensor.normal_(std=0.02)
                else:
                    tensor.zero_()
    return twin.to(device)

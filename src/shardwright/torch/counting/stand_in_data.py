"""Random data in place of a call's arguments and weights, with the right shapes."""

import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch._private import TorchFunctionMode
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor

__all__ = ["copy_of_module", "copy_of_object", "random_like"]


def random_like(leaf: Any, device: torch.device) -> Any:
    """Random numbers of the same shape and type; zeros for whole numbers, which may be indices."""
    if not isinstance(leaf, Tensor):
        return copy_of_object(leaf, lambda tensor: random_like(tensor, device))
    if leaf.dtype is torch.bool:
        return torch.ones(leaf.shape, dtype=torch.bool, device=device)
    if not leaf.is_floating_point() and not leaf.is_complex():
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    tensor = torch.randn(leaf.shape, dtype=leaf.dtype, device=device)
    return tensor.requires_grad_() if leaf.requires_grad else tensor


class _Replacing(TorchFunctionMode):
    """Decides what `deepcopy` puts in the place of a tensor."""

    def __init__(self, replace: Callable[[Tensor], Tensor]):
        super().__init__()
        self._replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (Tensor.__deepcopy__, DividedTensor.__deepcopy__):
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = new = self._replace(tensor)
        return new


def copy_of_object(item: Any, replace: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """A copy of something that a call may change (a cache of keys and values), with other tensors inside.

    `deepcopy` alone refuses tensors that were computed. What cannot be copied (a lock, a file) is given back
    itself.
    """
    try:
        with _Replacing(replace):
            return copy.deepcopy(item)
    except Exception:
        return item


def copy_of_module(
    module: nn.Module,
    device: torch.device,
    *,
    originals: Mapping[int, Tensor] | None = None,
    shared: Iterable[Any] = (),
    stands_for: Callable[[Tensor, Tensor], None] = lambda own, tensor: None,
) -> nn.Module:
    """A copy with weights of its own: random where the module has none."""
    memo: dict[int, Any] = {id(item): item for item in shared}
    for identifier, tensor in (originals or {}).items():
        memo[identifier] = _own(tensor, device)

    def replaced(tensor: Tensor) -> Tensor:
        # What a forward left in the module: `deepcopy` refuses tensors that were computed.
        if type(tensor) in (Tensor, nn.Parameter, DividedTensor) and tensor.grad_fn is None:
            same: Tensor = copy.deepcopy(tensor, memo)
            return same
        own: Tensor = random_like(tensor, device).detach()
        stands_for(own, tensor)
        return own

    with _Replacing(replaced):
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

"""Subclasses of tensors, and tensors that become others."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

__all__ = [
    "change_shape_only",
    "disabled_torch_function",
    "dtensor_of",
    "make_wrapper",
    "new_wrapper",
    "put_in_place",
    "spec_like",
    "without_subclass_functions",
]

# A subclass with this as __torch_function__ answers metadata without a detour through Python.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

# Makes a tensor of a class without memory: shape, strides, type and device.
new_wrapper: Any = torch.Tensor._make_wrapper_subclass


def make_wrapper(cls: type, like: torch.Tensor, *, device: torch.device | None = None) -> Any:
    """Makes a tensor subclass without storage, with the metadata of `like`; on that device, or another."""
    return torch.Tensor._make_wrapper_subclass(
        cls,
        like.shape,
        strides=like.stride() if like.layout == torch.strided else None,
        dtype=like.dtype,
        layout=like.layout,
        device=like.device if device is None else device,
        requires_grad=like.requires_grad,
    )


def change_shape_only(func: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Runs an operator that changes a shape in place on what a subclass shows, without its parts."""
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)


def without_subclass_functions() -> Any:
    """A context in which `__torch_function__` of tensor subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()


def put_in_place(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Makes a tensor another one, for everybody who has it; `other` becomes what it was.

    `torch.utils.swap_tensors` refuses what weak references or a graph know, and takes attributes away.
    """
    try:
        torch._C._swap_tensor_impl(tensor, other)
    except RuntimeError:
        torch.clear_autocast_cache()  # it has weak references, and is only a cache
        torch._C._swap_tensor_impl(tensor, other)
    tensor.__class__, other.__class__ = other.__class__, tensor.__class__


def dtensor_of(local: torch.Tensor, spec: Any) -> Any:
    """A `DTensor` of a local part, laid out as another one: ten times as fast as `DTensor.from_local`."""
    from torch.distributed.tensor import DTensor  # takes long to import, and few runs need it

    make: Any = DTensor
    return make(local, spec, requires_grad=False)


def spec_like(spec: Any, local: torch.Tensor) -> Any:
    """The layout of a `DTensor` that has this local part, and is otherwise like another one."""
    meta = spec.tensor_meta
    if meta is None or meta.dtype is local.dtype:
        return spec
    return replace(spec, tensor_meta=meta._replace(dtype=local.dtype))

"""Tensors: subclasses, storages, operators, function modes, and tensors without data."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch._subclasses.fake_tensor import UnsupportedOperatorException as UnsupportedOperatorException
from torch._subclasses.fake_tensor import unset_fake_temporarily as unset_fake_temporarily
from torch.autograd import forward_ad
from torch.multiprocessing.reductions import StorageWeakRef as StorageWeakRef
from torch.overrides import TorchFunctionMode as TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

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


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor, while it lives; unlike the address, that of an empty one, too."""
    return int(tensor.untyped_storage()._cdata)


def has_storage(tensor: torch.Tensor) -> bool:
    """Whether it has memory that other tensors may share: not those of `torch.func` (vmap, grad)."""
    return tensor.layout is torch.strided and bool(torch._C._has_storage(tensor))


def storage_key(tensor: torch.Tensor) -> int:
    """Equal for tensors that share memory, also for fake ones."""
    if tensor.layout is not torch.strided:
        return id(tensor)  # sparse tensors have no memory of their own to share
    try:
        return int(tensor.untyped_storage()._cdata)
    except NotImplementedError:
        return id(tensor)  # what `torch.func.vmap` hands to the function that it maps


def device_asked(func: Any, args: Any) -> torch.device | None:
    """The device for which a tensor without data is asked, by each operator that it is given to."""
    # Unlike its shape it is found by way of all dispatch modes: most of what they see are such questions.
    if func is _DEVICE and isinstance(args[0], FakeTensor):
        return args[0].fake_device
    return None


_DEVICE = torch.ops.prim.device.default


def num_sharing(tensor: torch.Tensor) -> int:
    """How many tensors, Python's and autograd's, share the memory of one that has memory; itself is one."""
    storage = tensor.untyped_storage()
    return int(torch._C._storage_Use_Count(storage._cdata)) - 1  # but `storage`


def flattened(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """All elements, in one dimension: as `torch.cat` of flat views, with one call for all of these."""
    flat: torch.Tensor = torch._utils._flatten_dense_tensors(tensors)  # type: ignore[no-untyped-call]
    return flat


def unflattened(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Parts of the first elements, of the shapes of others."""
    parts: Sequence[torch.Tensor] = torch._utils._unflatten_dense_tensors(flat, like)  # type: ignore[no-untyped-call]
    return parts


def weak_storage(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors that share memory, and stays theirs alone; None for those without."""
    if not has_storage(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


def values_of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """The stored entries of a sparse tensor, uncoalesced; `values()` insists that they are summed first."""
    values: torch.Tensor = tensor._values()
    return values


def packed_call(func: Any) -> Callable[..., Any]:
    """What calls an operator, without the method in Python around it."""
    call: Callable[..., Any] = func._op
    return call


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others: autograd takes it apart, and so does its `decompose`."""
    return bool(func._can_decompose())


def attention_kernel(tensors: Sequence[Any], *, dropout: float, causal: bool, grouped: bool) -> str:
    """The kernel that `scaled_dot_product_attention` takes; public are only those that it could take."""
    query, key, value, mask = tensors
    number = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(number, "PyTorch")


def generator_key(generator: torch.Generator) -> int:
    """Equal for all Python objects that stand for one generator: operations are handed new ones."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def attention_kernels_allowed() -> tuple[bool, ...]:
    """Which kernels `torch.nn.attention.sdpa_kernel` has allowed."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )


@contextmanager
def outside_of_modes() -> Iterator[None]:
    """A context in which neither `__torch_function__` nor a mode of dispatch sees what is done."""
    with torch._C.DisableTorchFunction():
        if not torch._C._len_torch_dispatch_stack():
            yield
        else:
            with _disable_current_modes():
                yield


@contextmanager
def outside_of_functions() -> Iterator[None]:
    """A context in which no `__torch_function__` is called, and no transform of `torch.func` is at work."""
    with torch._C.DisableTorchFunction():
        if torch._C._functorch.maybe_current_level() is None:
            yield
        else:
            with temporarily_clear_interpreter_stack():
                yield


def function_mode_depth() -> int:
    """The number of torch function modes that are active in this thread."""
    return torch._C._len_torch_function_stack()


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Activates a mode without its context manager: coroutines leave and enter in any order."""
    torch._C._push_on_torch_function_stack(mode)


def pop_function_mode() -> TorchFunctionMode:
    """Deactivates the topmost mode and returns it."""
    mode: TorchFunctionMode = torch._C._pop_torch_function_stack()
    return mode


def function_transforms_active() -> bool:
    """Whether `torch.func` (grad, vmap) or forward-mode differentiation is at work, here or further out."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


# Raised when an operation's result cannot be known without data.
FAKE_FAILURES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)


@contextmanager
def fake_failures_unlogged() -> Iterator[None]:
    """Keeps fake tensors from logging what also is raised, with all frames inside PyTorch."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


def new_fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real tensors that turn up are converted."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_is_active() -> bool:
    """Whether operations run on tensors without data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None

"""Every use of a private PyTorch interface, with its reason.

Tried on torch 2.13.0. When a new version of torch breaks something, it breaks here.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import FrameType
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedOperatorException,
    unset_fake_temporarily,
)
from torch.autograd import forward_ad, profiler
from torch.autograd.function import BackwardCFunction
from torch.distributed import _functional_collectives
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules._functions import BackwardHookFunction
from torch.nn.utils import clip_grad, parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

__all__ = [
    "FAKE_FAILURES",
    "BackwardHookFunction",
    "BatchNormBase",
    "FakeTensor",
    "FakeTensorMode",
    "HigherOrderOperator",
    "PlainBatchNorm",
    "StorageWeakRef",
    "TorchFunctionMode",
    "UnsupportedOperatorException",
    "attention_kernel",
    "backward_in_progress",
    "behind_inner_backward",
    "call_after_backward",
    "change_shape_only",
    "compiler_of",
    "default_group",
    "disabled_torch_function",
    "dtensor_of",
    "fake_failures_unlogged",
    "function_mode_depth",
    "function_transforms_active",
    "generator_key",
    "goes_into_gradients",
    "gradient_is_wanted",
    "gradient_transform_active",
    "has_storage",
    "hooks_of_every_module",
    "is_composite",
    "is_profiled",
    "make_wrapper",
    "memory_of",
    "new_fake_mode",
    "new_wrapper",
    "newest_node",
    "non_persistent_buffers",
    "non_persistent_buffers_of",
    "norms_of",
    "num_hooks_registered",
    "outside_of_functions",
    "packed_call",
    "parameters_to_clip",
    "pop_function_mode",
    "push_function_mode",
    "put_compiler_stance",
    "put_in_place",
    "put_parametrization_cache",
    "put_saved_tensor_hooks",
    "replace_total_norm",
    "run_backward",
    "running_node",
    "saved_tensor_hooks",
    "spec_like",
    "storage_key",
    "take_saved_tensor_hooks",
    "transforms_beside_hooks",
    "unset_fake_temporarily",
    "values_of_sparse",
    "without_subclass_functions",
]

# Raised when an operation's result cannot be known without data.
FAKE_FAILURES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedOperatorException)

# What batch and instance norms have in common: running statistics, and their momentum.
BatchNormBase = torch.nn.modules.batchnorm._NormBase

# What a synchronised batch norm is for a single replica.
PlainBatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm

# A subclass with this as __torch_function__ answers metadata without a detour through Python.
disabled_torch_function: Any = torch._C._disabled_torch_function_impl

_CODE_OF_CUSTOM_BACKWARD = tuple(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")  # torch before 2.13 has no apply_boxed
    if hasattr(BackwardCFunction, name)
)
# Makes a tensor of a class without memory: shape, strides, type and device.
new_wrapper: Any = torch.Tensor._make_wrapper_subclass


def packed_call(func: Any) -> Callable[..., Any]:
    """What calls an operator, without the method in Python around it."""
    call: Callable[..., Any] = func._op
    return call


def change_shape_only(func: Any, args: Sequence[Any], kwargs: Any) -> None:
    """Runs an operator that changes a shape in place on what a subclass shows, without its parts."""
    with torch._C._DisableTorchDispatch():
        func(*args, **kwargs)


def memory_of(tensor: torch.Tensor) -> int:
    """Identifies the memory of a tensor, while it lives; unlike the address, that of an empty one, too."""
    return int(tensor.untyped_storage()._cdata)


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others: autograd takes it apart, and so does its `decompose`."""
    return bool(func._can_decompose())


def newest_node() -> int:
    """The sequence number of the autograd node that this thread made last."""
    return int(torch._C._autograd._get_sequence_nr()) - 1


def running_node() -> int | None:
    """The sequence number of the autograd node whose backward runs; None outside of a backward."""
    node: Any = torch._C._current_autograd_node()
    return None if node is None else int(node._sequence_nr())


def put_parametrization_cache(state: tuple[int, dict[Any, Any]] | None) -> tuple[int, dict[Any, Any]]:
    """Puts the weights that `parametrize.cached` keeps in force, and how many such blocks are open.

    PyTorch has one cache for all, so that a microbatch would find the weights, and the graph, of another.

    Args:
        state: to be put; by default no weights, and as many blocks as there are.

    Returns:
        What was in force.
    """
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = state or (before[0], {})
    return before


@contextmanager
def default_group(
    group: Any,
    *,
    on_other: Callable[[Any], None] | None = None,
    on_functional: Callable[[Any], None] | None = None,
) -> Iterator[None]:
    """Has another process group be the default one.

    Args:
        group: the default group inside.
        on_other: called with another group that is given to a function of torch.distributed.
        on_functional: called with what a functional collective is given for a group.
    """
    c10d: Any = torch.distributed.distributed_c10d
    before, is_none_of = c10d._world.default_pg, c10d._rank_not_in_group
    added = group not in c10d._world.pg_map

    def look(asked: Any) -> bool:
        if asked is not None and asked is not group and on_other is not None:
            on_other(asked)
        return bool(is_none_of(asked))

    c10d._world.default_pg = group
    if added:
        c10d._world.pg_map[group] = c10d._world.pg_map[before]  # the backend, and the store
    if on_other is not None:
        c10d._rank_not_in_group = look
    functional: Any = _functional_collectives
    # torch before 2.13 has the second alone.
    name = "_resolve_group" if hasattr(functional, "_resolve_group") else "_resolve_group_name"
    resolve = getattr(functional, name)

    def resolved(asked: Any, *args: Any) -> Any:
        if on_functional is not None:
            on_functional(asked)
        return resolve(asked, *args)

    setattr(functional, name, resolved)
    try:
        yield
    finally:
        setattr(functional, name, resolve)
        c10d._world.default_pg, c10d._rank_not_in_group = before, is_none_of
        if added:
            del c10d._world.pg_map[group]


@contextmanager
def fake_failures_unlogged() -> Iterator[None]:
    """Keeps fake tensors from logging what also is raised, with all frames inside PyTorch."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


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


def new_fake_mode() -> FakeTensorMode:
    """A mode in which tensors have shapes and no data; real tensors that turn up are converted."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_mode_is_active() -> bool:
    """Whether operations run on tensors without data."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


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


def weak_storage(tensor: torch.Tensor) -> Any:
    """A key that is equal for tensors that share memory, and stays theirs alone; None for those without."""
    if not has_storage(tensor):
        return None
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]


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


def generator_key(generator: torch.Generator) -> int:
    """Equal for all Python objects that stand for one generator: operations are handed new ones."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def hooks_of_every_module() -> tuple[dict[int, Any], ...]:
    """The registries of `torch.nn.modules.module.register_module_forward_hook` and its like."""
    module = torch.nn.modules.module
    return (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    )


def replace_total_norm(make: Callable[[Callable[..., torch.Tensor]], Callable[..., torch.Tensor]]) -> None:
    """Puts a function in the place of the one that `clip_grad_norm_` takes norms by.

    Scripts import `clip_grad_norm_` by name before the library could replace it; what it calls is looked up.
    """
    original = clip_grad._get_total_norm
    if getattr(original, "__module__", None) != clip_grad.__name__:
        return  # replaced already
    replacement = make(original)
    clip_grad._get_total_norm = replacement
    if getattr(torch.nn.utils, "get_total_norm", None) is original:
        torch.nn.utils.get_total_norm = replacement


def parameters_to_clip(caller: FrameType) -> Sequence[torch.Tensor]:
    """The parameters of `clip_grad_norm_`, if that asks for a norm: it passes on the gradients alone."""
    if caller.f_code is not inspect.unwrap(clip_grad.clip_grad_norm_).__code__:
        return ()
    return tuple(caller.f_locals.get("parameters", ()))


def num_hooks_registered() -> int:
    """The number of hooks ever registered, on modules and tensors: it grows with each."""
    return int(RemovableHandle.next_id)


def function_mode_depth() -> int:
    """The number of torch function modes that are active in this thread."""
    return torch._C._len_torch_function_stack()


def run_backward(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward`, but function modes stay active in Python code that the backward runs."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_in_progress() -> int:
    """A number for the backward that calls this code: one that is started inside another has its own."""
    return int(torch._C._current_graph_task_id())


def call_after_backward(call: Callable[[], None]) -> None:
    """Has something called when the backward in progress, which calls this code, is over."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def behind_inner_backward() -> list[Any]:
    """Of a backward that a custom function started in its own: nodes that the one around it comes to next.

    Nothing for one that code calling this is in by itself. The gradients that the function gives go to them.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in _CODE_OF_CUSTOM_BACKWARD:
            return [node for node, _ in frame.f_locals["self"].next_functions if node is not None]
        frame = frame.f_back
    return []


def goes_into_gradients(parameter: torch.Tensor) -> bool:
    """Whether the backward in progress, which calls this code, adds to the gradient of a parameter."""
    node = torch.autograd.graph.get_gradient_edge(parameter).node
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return False  # `torch.autograd.grad` asks for it, and returns it


def gradient_is_wanted(node: Any, position: int) -> bool:
    """Whether the backward in progress has a use for the gradient of an input that is a parameter.

    Args:
        node: the context of a custom function.
        position: of the input; all inputs before it are tensors.
    """
    if not node.needs_input_grad[position]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[position][0]))
    except RuntimeError:
        return True  # `torch.autograd.grad` asks for this parameter


def function_transforms_active() -> bool:
    """Whether `torch.func` (grad, vmap) or forward-mode differentiation is at work, here or further out."""
    return torch._C._functorch.maybe_current_level() is not None or forward_ad._current_level >= 0


def attention_kernel(tensors: Sequence[Any], *, dropout: float, causal: bool, grouped: bool) -> str:
    """The kernel that `scaled_dot_product_attention` takes; public are only those that it could take.

    Args:
        tensors: queries, keys, values, and the mask or None.
        dropout: share of dropped weights.
        causal: as there.
        grouped: keys have fewer heads than queries.
    """
    query, key, value, mask = tensors
    number = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(number, "PyTorch")


def gradient_transform_active() -> bool:
    """Whether one of `torch.func` that takes gradients (grad, vjp, jacrev, hessian) is at work.

    They refuse hooks for saved tensors meanwhile.
    """
    return not torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]


def saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """The innermost hooks for saved tensors (pack, unpack) that are in force in this thread, if any."""
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return None if hooks is None else (hooks[0], hooks[1])


def take_saved_tensor_hooks() -> list[Any]:
    """Removes the hooks that `torch.autograd.graph.saved_tensors_hooks` has installed in this thread."""
    taken: list[Any] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(False)) is not None:
        taken.append(top)
        torch._C._autograd._pop_saved_tensors_default_hooks()
    return taken[::-1]


def put_saved_tensor_hooks(hooks: Sequence[Any]) -> None:
    """Installs what `take_saved_tensor_hooks` removed."""
    for pack, unpack in hooks:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


@contextmanager
def transforms_beside_hooks() -> Iterator[None]:
    """Inside, `torch.func` (grad, vjp, jacrev) puts hooks for saved tensors aside; PyTorch refuses them.

    What is counted with such hooks is not seen there, but the code runs.
    """
    refuse = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def put_aside(error_message: str) -> Iterator[None]:
        taken = take_saved_tensor_hooks()
        try:
            with refuse(error_message):
                yield
        finally:
            put_saved_tensor_hooks(taken)

    torch.autograd.graph.disable_saved_tensors_hooks = put_aside
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = refuse


def without_subclass_functions() -> Any:
    """A context in which `__torch_function__` of tensor subclasses is not called."""
    return torch._C.DisableTorchFunctionSubclass()


@contextmanager
def outside_of_functions() -> Iterator[None]:
    """A context in which no `__torch_function__` is called, and no transform of `torch.func` is at work."""
    with torch._C.DisableTorchFunction():
        if torch._C._functorch.maybe_current_level() is None:
            yield
        else:
            with temporarily_clear_interpreter_stack():
                yield


def push_function_mode(mode: TorchFunctionMode) -> None:
    """Activates a mode without its context manager: coroutines leave and enter in any order."""
    torch._C._push_on_torch_function_stack(mode)


def pop_function_mode() -> TorchFunctionMode:
    """Deactivates the topmost mode and returns it."""
    mode: TorchFunctionMode = torch._C._pop_torch_function_stack()
    return mode


def non_persistent_buffers(model: torch.nn.Module) -> set[str]:
    """Names of the buffers that `state_dict` leaves out, in a model."""
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in non_persistent_buffers_of(module)
    }


def non_persistent_buffers_of(module: torch.nn.Module) -> set[str]:
    """Names of the buffers of one module that `state_dict` leaves out: only a private set has them."""
    return module._non_persistent_buffers_set


def norms_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each of some tensors of one type and device, in float32 at least.

    On GPUs this is a kernel or two for all of them, as in `torch.nn.utils.clip_grad_norm_`; a function for it
    is not public.
    """
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    norms: Sequence[torch.Tensor] = torch._foreach_norm(list(tensors), 2.0, dtype=wide)
    return norms


def values_of_sparse(tensor: torch.Tensor) -> torch.Tensor:
    """The stored entries of a sparse tensor, uncoalesced; `values()` insists that they are summed first."""
    values: torch.Tensor = tensor._values()
    return values


def put_compiler_stance(stance: Any) -> Any:
    """Tells `torch.compile` what to do with compiled code; gives back what it did before.

    `torch.compiler.set_stance` does the same by an object that is put back in the order of a stack only.

    Args:
        stance: an earlier one; None to run everything as it is written.
    """
    put, as_written = _stances()
    return put(as_written if stance is None else stance)


@functools.cache
def _stances() -> tuple[Callable[[Any], Any], Any]:
    from torch._dynamo.eval_frame import DynamoStance, _set_stance  # takes long to import

    return _set_stance, DynamoStance("force_eager")


def compiler_of(compiled: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]] | None:
    """Compiles other functions as this module or function was compiled; None if it was not.

    It has the backend and the options that were given to `torch.compile`.
    """
    own = vars(compiled).get("dynamo_ctx")
    if own is None and hasattr(compiled, "_torchdynamo_orig_callable"):
        own = inspect.getclosurevars(compiled).nonlocals.get("self")
    return own  # type: ignore[no-any-return]


def is_profiled() -> bool:
    """Whether a profiler of PyTorch records in this process.

    A range of `torch.profiler.record_function` takes microseconds where none does, and this a lookup.
    """
    return profiler._is_profiler_enabled

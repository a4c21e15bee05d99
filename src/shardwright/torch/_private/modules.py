"""Modules, code and autograd: hooks, buffers, `torch.compile`, the profiler, nodes and what they save."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import _guards
from torch.autograd import profiler
from torch.autograd.function import BackwardCFunction
from torch.distributed import _functional_collectives
from torch.nn.modules._functions import BackwardHookFunction as BackwardHookFunction
from torch.nn.utils import clip_grad, parametrize
from torch.utils.hooks import RemovableHandle

# What batch and instance norms have in common: running statistics, and their momentum.
BatchNormBase = torch.nn.modules.batchnorm._NormBase

# What a synchronised batch norm is for a single replica.
PlainBatchNorm: Any = torch.nn.modules.batchnorm._BatchNorm


def hooks_of_every_module() -> tuple[dict[int, Any], ...]:
    """The registries of `torch.nn.modules.module.register_module_forward_hook` and its like."""
    module = torch.nn.modules.module
    return (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    )


def num_hooks_registered() -> int:
    """The number of hooks ever registered, on modules and tensors: it grows with each."""
    return int(RemovableHandle.next_id)


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


def num_parametrization_caches() -> int:
    """How many blocks of `parametrize.cached` are open."""
    return parametrize._cache_enabled


def put_parametrization_cache(state: tuple[int, dict[Any, Any]] | None) -> tuple[int, dict[Any, Any]]:
    """Puts the weights that `parametrize.cached` keeps in force, and how many such blocks are open.

    PyTorch has one cache for all, so that a microbatch would find the weights, and the graph, of another.
    """
    before = parametrize._cache_enabled, parametrize._cache
    parametrize._cache_enabled, parametrize._cache = state or (before[0], {})
    return before


@functools.cache
def _stances() -> tuple[Callable[[Any], Any], Any]:
    from torch._dynamo.eval_frame import DynamoStance, _set_stance  # takes long to import

    return _set_stance, DynamoStance("force_eager")


def compiler_is_used() -> bool:
    """Whether anything of this process is to be compiled: the compiler notes the backend of each that is."""
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    return frames is not None and any(each is not None for each in frames.cached_backends.values())


def put_compiler_stance(stance: Any) -> Any:
    """Tells `torch.compile` what to do with compiled code; gives back what it did before.

    `torch.compiler.set_stance` does the same by an object that is put back in the order of a stack only.
    """
    put, as_written = _stances()
    return put(as_written if stance is None else stance)


def compile_with_backward(backend: str, graph: Any, inputs: Any) -> Any:
    """Compiles a graph of the compiler's by a backend of this name, forward and backward now.

    PyTorch keeps what goes wrong with the backward until it is called, in the middle of a step. Kernels draw
    the random numbers of code as written, and as many.
    """
    from torch._dynamo import lookup_backend  # takes long to import
    from torch._functorch import config
    from torch._inductor import config as of_kernels

    at_once, alike = {"force_non_lazy_backward_lowering": True}, {"fallback_random": True}
    with config.patch(at_once), of_kernels.patch(alike):
        return lookup_backend(backend)(graph, inputs)


def is_for_compiler(error: Exception) -> bool:
    """Whether a backend's error has the compiler begin anew or leave a function, or tells of no memory."""
    from torch._dynamo.exc import RestartAnalysis, SkipFrame

    inner = getattr(error, "inner_exception", error)  # of one that the compiler has put around it
    return isinstance(inner, RestartAnalysis | SkipFrame | torch.OutOfMemoryError)


def code_being_compiled() -> str:
    """The name of the function of which the compiler has made the graph that a backend gets."""
    codes = _guards.TracingContext.get_traced_code()
    return codes[0].co_name if codes else "a unit"


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


@contextmanager
def default_group(
    group: Any,
    *,
    on_other: Callable[[Any], None] | None = None,
    on_functional: Callable[[Any], None] | None = None,
) -> Iterator[None]:
    """Has another process group be the default one."""
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


_CODE_OF_CUSTOM_BACKWARD = tuple(
    getattr(BackwardCFunction, name).__code__
    for name in ("apply", "apply_boxed")  # torch before 2.13 has no apply_boxed
    if hasattr(BackwardCFunction, name)
)


def run_backward(roots: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
    """`torch.autograd.backward`, but function modes stay active in Python code that the backward runs."""
    torch.autograd.Variable._execution_engine.run_backward(
        tuple(roots), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def backward_in_progress() -> int:
    """A number for the backward that calls this code: one that is started inside another has its own."""
    return int(torch._C._current_graph_task_id())


def backward_keeps_graph() -> bool:
    """Whether the backward in progress leaves what was saved for another one (``retain_graph``)."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


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
    """Whether the backward in progress has a use for the gradient of an input that is a parameter."""
    if not node.needs_input_grad[position]:
        return False
    try:
        return bool(torch._C._will_engine_execute_node(node.next_functions[position][0]))
    except RuntimeError:
        return True  # `torch.autograd.grad` asks for this parameter


def saved_by(node: Any, name: str) -> Any:
    """What a node of autograd has saved under a name; None where it has no such thing."""
    return getattr(node, f"_saved_{name}", None)


def shape_behind(node: Any) -> tuple[int, ...] | None:
    """The shape of the tensor that a node of autograd has made, its first; None where it is unknown."""
    metadata = getattr(node, "_input_metadata", None)
    return tuple(metadata[0].shape) if metadata else None


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


def norms_of(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """The norm of each of some tensors of one type and device, in float32 at least.

    On GPUs this is a kernel or two for all of them, as in `torch.nn.utils.clip_grad_norm_`; a function for it
    is not public.
    """
    wide = torch.float32 if tensors[0].dtype in (torch.float16, torch.bfloat16) else None
    norms: Sequence[torch.Tensor] = torch._foreach_norm(list(tensors), 2.0, dtype=wide)
    return norms

"""Modules and code: hooks, buffers, `torch.compile`, the profiler, the default process group."""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import profiler
from torch.distributed import _functional_collectives
from torch.nn.utils import parametrize
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

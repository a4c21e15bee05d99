"""What scripts say of modules while, or after, they create them: place, memory, type, tensor parallelism."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from smdistributed.modelparallel.torch.module_proxy import unproxied
from smdistributed.modelparallel.torch.nn.distributed import DistributedModule
from smdistributed.modelparallel.torch.state_mod import current_run, state

__all__ = [
    "delay_param_initialization",
    "model_creation",
    "partition",
    "set_partition",
    "set_tensor_parallelism",
    "tensor_parallelism",
    "tp_register",
    "tp_register_with_module",
]


def partition(rank: int) -> AbstractContextManager[None]:
    """Places the modules that are created inside on a pipeline rank; the innermost wish wins.

    It is heeded where ``auto_partition`` is False; else nothing happens, also for a rank that is not there:
    scripts rely on it.

    Args:
        rank: pipeline rank, from 0.
    """
    return nullcontext() if current_run().config.auto_partition else sw.partition(rank)


def set_partition(module: nn.Module, rank: int) -> None:
    """Places a module, and what is inside it, on a pipeline rank; call it before the first step.

    It is heeded where ``auto_partition`` is False; else nothing happens.

    Args:
        module: any module of the model.
        rank: pipeline rank, from 0.
    """
    if not current_run().config.auto_partition:
        sw.set_partition(unproxied(module), rank)


@contextmanager
def delay_param_initialization(enabled: bool = True) -> Iterator[None]:
    """Builds a model without memory for its parameters, which get the same values when they are placed.

    Args:
        enabled: False does nothing.
    """
    current_run()
    with sw.delay_param_initialization(enabled):
        yield


@contextmanager
def tensor_parallelism(enabled: bool = True, **tp_config: Any) -> Iterator[None]:
    """Marks the modules that are created inside for tensor parallelism.

    With tensor_parallel_degree 1, which is the only one yet, modules stay as they are.

    Args:
        enabled: False does nothing.
        **tp_config: options of the distributed modules.
    """
    current_run()
    if enabled:
        state.wants_distributed_modules = True
    yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **tp_config: Any) -> None:
    """Marks a module for tensor parallelism: with tensor_parallel_degree 1 it stays as it is.

    Args:
        module: any module.
        enabled: False takes the mark off.
        **tp_config: options of the distributed module.
    """
    current_run()
    if not isinstance(unproxied(module), nn.Module):
        raise UsageError(f"set_tensor_parallelism takes an nn.Module, not a {type(module).__name__}.")
    if enabled:
        state.wants_distributed_modules = True


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_config: Any
) -> Iterator[None]:
    """Builds a model in a type, and without memory if ``delayed_parameter_initialization`` is set.

    Args:
        tensor_parallelism: as `tensor_parallelism`.
        dtype: of parameters; None for PyTorch's default.
        **tp_config: options of distributed modules.
    """
    delays = bool(state.cfg.delayed_parameter_initialization)
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"dtype is {dtype}, but parameters are floating-point numbers.")
    if tensor_parallelism:
        state.wants_distributed_modules = True
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        with sw.delay_param_initialization(delays):
            yield
    finally:
        torch.set_default_dtype(before)


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Names a distributed module for a class, which with tensor_parallel_degree 1 stays as it is.

    Args:
        dist_module: a class of ``smp.nn``.
        init_hook: translates the arguments of ``__init__``.
        forward_hook: translates the arguments of ``forward``.
        return_hook: translates what ``forward`` returns.
    """

    def register(module_class: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(module_class, dist_module, init_hook, forward_hook, return_hook)
        return module_class

    return register


def tp_register_with_module(
    module_class: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> None:
    """As `tp_register`, for a class that exists already."""
    if not isinstance(module_class, type) or not issubclass(module_class, nn.Module):
        raise UsageError(f"tp_register is for a class of modules, and {module_class!r} is none.")
    if not isinstance(dist_module, type) or not issubclass(dist_module, DistributedModule):
        raise UsageError(
            f"{dist_module!r} is no distributed module. Use a class of smp.nn, such as "
            "smp.nn.DistributedTransformerLayer."
        )
    for name, hook in (("init", init_hook), ("forward", forward_hook), ("return", return_hook)):
        if hook is not None and not callable(hook):
            raise UsageError(f"{name}_hook is {hook!r}, but it is a function.")

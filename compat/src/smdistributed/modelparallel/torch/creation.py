"""What scripts say of modules while, or after, they create them: place, memory, type, tensor parallelism."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

import shardwright.torch as sw
from shardwright.errors import UsageError
from shardwright.torch.attention.model_creation import route_attention
from smdistributed.modelparallel.torch.module_proxy import unproxied
from smdistributed.modelparallel.torch.nn.distributed import DistributedModule
from smdistributed.modelparallel.torch.state_mod import current_run, state
from smdistributed.modelparallel.torch.tensor_parallelism.distributing import check_options
from smdistributed.modelparallel.torch.tensor_parallelism.marks import Wish, marking, set_mark
from smdistributed.modelparallel.torch.tensor_parallelism.registration import Registered, register


def partition(rank: int) -> AbstractContextManager[None]:
    """Places the modules that are created inside on a pipeline rank; the innermost wish wins.

    It is heeded where ``auto_partition`` is False; else nothing happens, also for a rank that is not there:
    scripts rely on it.
    """
    return nullcontext() if current_run().config.auto_partition else sw.partition(rank)


def set_partition(module: nn.Module, rank: int) -> None:
    """Places a module, and what is inside it, on a pipeline rank; call it before the first step.

    It is heeded where ``auto_partition`` is False; else nothing happens.
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
    """Has the supported modules that are created inside distributed when the model is wrapped.

    The outermost supported module is; the innermost context wins. See `model_creation`.

    Args:
        enabled: False leaves what is created inside as it is, and whole on every rank.
        **tp_config: arguments of the distributed modules, which win over what a model has.
    """
    current_run()
    check_options(tp_config)
    flash_attention = tp_config.get("flash_attention", True) if enabled else None
    state.wants_distributed_modules |= enabled
    with marking(Wish(enabled, tp_config)), sw.model_creation(flash_attention=flash_attention):
        yield


def set_tensor_parallelism(module: nn.Module, enabled: bool = True, **tp_config: Any) -> None:
    """Has the supported modules in a module distributed when the model is wrapped; call it before.

    Args:
        enabled: False leaves it as it is, and whole on every rank.
        **tp_config: arguments of the distributed modules, which win over what a model has.
    """
    current_run()
    check_options(tp_config)
    marked = unproxied(module)
    if not isinstance(marked, nn.Module):
        raise UsageError(f"set_tensor_parallelism takes an nn.Module, not a {type(module).__name__}.")
    if state.model is not None:
        raise UsageError("the model is wrapped already. Call set_tensor_parallelism before.")
    for each in marked.modules():
        set_mark(each, Wish(enabled, tp_config))
    if enabled:
        state.wants_distributed_modules = True
        route_attention(marked, flash_attention=bool(tp_config.get("flash_attention", True)))


@contextmanager
def model_creation(
    tensor_parallelism: bool = False, dtype: torch.dtype | None = None, **tp_config: Any
) -> Iterator[None]:
    """Builds a model in a type, and without memory if ``delayed_parameter_initialization`` is set.

    Args:
        **tp_config: arguments of distributed modules: `distribute_embedding` (each rank has some words, else
            every rank has all), and those of `LayerOptions`: `attention_in_fp32`, `fp32_residual_addition`,
            `query_key_layer_scaling`, `use_alibi`, `zero_init`, `fused_softmax`, `fused_dropout`,
            `fused_bias_gelu`, `flash_attention`. The last one holds without tensor parallelism, too.
    """
    delays = bool(state.cfg.delayed_parameter_initialization)
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"dtype is {dtype}, but parameters are floating-point numbers.")
    check_options(tp_config)
    marks: AbstractContextManager[None] = nullcontext()
    if tensor_parallelism:
        state.wants_distributed_modules = True
        marks = marking(Wish(enabled=True, options={**tp_config, "dtype": dtype}))
    before = torch.get_default_dtype()
    try:
        if dtype is not None:
            torch.set_default_dtype(dtype)
        flash_attention = tp_config.get("flash_attention", True if tensor_parallelism else None)
        with sw.delay_param_initialization(delays), marks, sw.model_creation(flash_attention=flash_attention):
            yield
    finally:
        torch.set_default_dtype(before)


def tp_register(
    dist_module: type[DistributedModule],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Registers a distributed module for a class: it takes the place of marked modules of this class.

    Its weights are theirs where names and shapes are the same, and fresh ones elsewhere.

    Args:
        init_hook: has the parameters of the class's ``__init__`` without self, and returns the arguments of
            the distributed module's: ``(args, kwargs)``.
        return_hook: takes what the distributed module returns, and returns what the class's forward would.

    Raises:
        UsageError: a hook has other parameters, or is missing where the classes differ.
    """

    def register_class(module_class: type[nn.Module]) -> type[nn.Module]:
        tp_register_with_module(module_class, dist_module, init_hook, forward_hook, return_hook)
        return module_class

    return register_class


def tp_register_with_module(
    module_class: type[nn.Module],
    dist_module: type[DistributedModule],
    init_hook: Callable[..., Any] | None = None,
    forward_hook: Callable[..., Any] | None = None,
    return_hook: Callable[..., Any] | None = None,
) -> None:
    """As `tp_register`, for a class that exists already; before modules of it are created."""
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
    register(module_class, Registered(dist_module, init_hook, forward_hook, return_hook))

"""What modules have beside their parameters: hooks, buffers, weights made by `parametrize`."""

from typing import Any

import torch
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

__all__ = [
    "BatchNormBase",
    "PlainBatchNorm",
    "hooks_of_every_module",
    "non_persistent_buffers",
    "non_persistent_buffers_of",
    "num_hooks_registered",
    "num_parametrization_caches",
    "put_parametrization_cache",
]

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

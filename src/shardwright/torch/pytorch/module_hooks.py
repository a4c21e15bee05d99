"""Forward hooks that a step function registers and removes within one microbatch.

In a plain loop such a hook sees one microbatch: it is removed before the next begins. Over several stages a
rank suspends one microbatch and enters another, so each must find the hooks that it registered itself, and no
others::

    microbatch 0:  register, call block 0 ┐                ┌ call block 2, remove
    microbatch 1:                         └ call block 0 ──┘            the hook of 0 must not be called here
"""

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from shardwright.torch.pytorch.source_line import is_running

__all__ = [
    "OwnHooks",
    "forward_hook_is_running",
    "forward_hooks_put",
    "has_backward_hooks",
    "hook_registries",
]


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks for the gradients of what it is given and gives."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def hook_registries(module: nn.Module) -> tuple[dict[int, Any], ...]:
    """The registries of a module's forward hooks."""
    return (
        module._forward_hooks,
        module._forward_hooks_with_kwargs,
        module._forward_hooks_always_called,
        module._forward_pre_hooks,
        module._forward_pre_hooks_with_kwargs,
    )


def forward_hook_is_running(model: nn.Module) -> bool:
    """Whether a forward hook of a module of the model is among the callers."""
    return is_running(
        hook
        for module in model.modules()
        for hooks in (module._forward_hooks, module._forward_pre_hooks)
        for hook in hooks.values()
    )


class OwnHooks:
    """The hooks of one microbatch."""

    def __init__(self, model: nn.Module):
        self._registries = [registry for module in model.modules() for registry in hook_registries(module)]
        self._own: list[dict[int, Any]] | None = None

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Has the modules call these hooks; what is registered and removed inside stays with them."""
        outside = [dict(registry) for registry in self._registries]
        if self._own is not None:
            self._put(self._own)
        try:
            yield
        finally:
            self._own = [dict(registry) for registry in self._registries]
            self._put(outside)

    def _put(self, contents: list[dict[int, Any]]) -> None:
        # In place: the handle that removes a hook knows the registry itself.
        for registry, content in zip(self._registries, contents, strict=True):
            if registry.keys() != content.keys():
                registry.clear()
                registry.update(content)


@contextmanager
def forward_hooks_put(
    module: nn.Module, hooks: OrderedDict[int, Any], pre_hooks: OrderedDict[int, Any]
) -> Iterator[None]:
    """Gives a module these forward hooks instead of its own, inside the context."""
    own = module._forward_hooks, module._forward_pre_hooks
    module._forward_hooks, module._forward_pre_hooks = hooks, pre_hooks
    try:
        yield
    finally:
        module._forward_hooks, module._forward_pre_hooks = own

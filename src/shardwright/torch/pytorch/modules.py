"""Modules: their tree, their forward hooks, and those created inside of a ``with`` statement.

A forward hook that a step function registers sees one microbatch in a plain loop: it is removed before the
next begins. Over several stages a rank suspends one microbatch and enters another, so each must find the
hooks that it registered itself, and no others::

    microbatch 0:  register, call block 0 ┐                ┌ call block 2, remove
    microbatch 1:                         └ call block 0 ──┘            the hook of 0 must not be called here
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from shardwright.torch.pytorch.source_line import is_running

OF_EVERY_MODULE = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
"""Attributes for parameters, buffers, modules, hooks and compiled code, and `training`."""


def all_modules(model: nn.Module) -> list[nn.Module]:
    """The module and all inside it, each once, in the order of `torch.nn.Module.modules`.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.ReLU()))
    >>> all_modules(model) == list(model.modules())
    True
    """
    found: list[nn.Module] = []
    seen: set[int] = set()
    pending = [model]
    while pending:
        module = pending.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        found.append(module)
        if module._modules:
            pending += [child for child in reversed(module._modules.values()) if child is not None]
    return found


def _prefixes(model: nn.Module) -> list[str]:
    """Of names in what `all_modules` gives, in its order; also where a model gives other names to modules."""
    found: dict[int, str] = {}
    pending = [("", model)]
    while pending:
        prefix, module = pending.pop()
        if id(module) not in found:
            found[id(module)] = prefix
            children = reversed(module._modules.items())
            pending += [(f"{prefix}{name}.", child) for name, child in children if child is not None]
    return list(found.values())


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, each once, in the order of `torch.nn.Module.parameters`."""
    return _parameters_of(all_modules(model))


def _parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    found = [p for module in modules for p in module._parameters.values() if p is not None]
    return list({id(parameter): parameter for parameter in found}.values())


class ModelTree:
    """The modules and parameters of a model, walked anew only where a module was given others."""

    def __init__(self, model: Callable[[], nn.Module]):
        self._model = model
        self._held: list[Any] = []
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []
        self._named_for: list[nn.Module] | None = None
        self._names: list[str] = []

    @property
    def modules(self) -> list[nn.Module]:
        """As `all_modules` gives them; the same list as long as they and the parameters are the same."""
        self._look()
        return self._modules

    @property
    def parameters(self) -> list[nn.Parameter]:
        """As `all_parameters` gives them; the same list as long as they and the modules are the same."""
        self._look()
        return self._parameters

    def named_buffers(self) -> dict[str, torch.Tensor]:
        """As `torch.nn.Module.named_buffers` gives them; a module keeps the name that it had at first."""
        self._look()
        if self._named_for is not self._modules:
            self._named_for = self._modules
            self._names = _prefixes(self._model())
        found: dict[int, tuple[str, torch.Tensor]] = {}
        for prefix, module in zip(self._names, self._modules, strict=True):
            if module._buffers:
                for name, buffer in module._buffers.items():
                    if buffer is not None:
                        found.setdefault(id(buffer), (prefix + name, buffer))
        return dict(found.values())

    def _look(self) -> None:
        now = self._now()
        if len(now) == len(self._held) and all(map(is_, now, self._held)):
            return
        self._modules = all_modules(self._model())
        self._parameters = _parameters_of(self._modules)
        self._held = self._now()

    def _now(self) -> list[Any]:
        now: list[Any] = [self._model()]
        for module in self._modules:
            children, parameters = module._modules, module._parameters
            if children:
                now += children.values()
            if parameters:
                now += parameters.values()
        return now


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


_Setting = TypeVar("_Setting")


class CreationWatch(Generic[_Setting]):
    """Tells of each module whose constructor begins inside of a ``with`` statement."""

    def __init__(self, begins: Callable[[nn.Module, _Setting], None]):
        self._begins = begins
        self._settings: list[_Setting] = []
        self._original: Any = None

    @contextmanager
    def inside(self, setting: _Setting) -> Iterator[None]:
        """Watches until the statement ends."""
        if not self._settings:
            self._original = nn.Module.__init__
            nn.Module.__init__ = self._constructor()  # type: ignore[method-assign]
        self._settings.append(setting)
        try:
            yield
        finally:
            self._settings.pop()
            if not self._settings:
                nn.Module.__init__ = self._original  # type: ignore[method-assign]

    def _constructor(self) -> Any:
        original = self._original

        def __init__(module: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(module, *args, **kwargs)
            self._begins(module, self._settings[-1])

        return __init__

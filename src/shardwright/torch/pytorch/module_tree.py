"""Walks a model fast, for work in every step: `nn.Module.modules` builds a name for each module.

It also knows the attributes that every module has, whatever its class.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import nn

__all__ = ["OF_EVERY_MODULE", "ModelTree", "all_modules", "all_parameters"]

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


def all_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All parameters, each once, in the order of `torch.nn.Module.parameters`."""
    return _parameters_of(all_modules(model))


def _parameters_of(modules: Sequence[nn.Module]) -> list[nn.Parameter]:
    found = [p for module in modules for p in module._parameters.values() if p is not None]
    return list({id(parameter): parameter for parameter in found}.values())


class ModelTree:
    """The modules and parameters of a model, walked anew only where a module was given others.

    Args:
        model: gives it, as it is now.
    """

    def __init__(self, model: Callable[[], nn.Module]):
        self._model = model
        self._held: list[Any] = []
        self._modules: list[nn.Module] = []
        self._parameters: list[nn.Parameter] = []

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

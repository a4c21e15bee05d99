"""Walks a model fast, for work in every step: `nn.Module.modules` builds a name for each module.

It also knows the attributes that every module has, whatever its class.
"""

from torch import nn

__all__ = ["OF_EVERY_MODULE", "all_modules", "all_parameters"]

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
    found = [p for module in all_modules(model) for p in module._parameters.values() if p is not None]
    return list({id(parameter): parameter for parameter in found}.values())

"""TorchScript functions and modules (`torch.jit.script`, `torch.jit.trace`), which bypass Python.

PyTorch does not show their calls to function modes, and fake tensors cannot pass through them. A function's
call between units is one operation. A scripted module is replaced in the model by a Python module that owns
its parameters and buffers, so they are released, sharded and replaced like any others.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch._private import FakeTensor, UnsupportedOperatorException
from shardwright.torch.interception.glue import active_handler, plain_torch
from shardwright.torch.pytorch.tree import leaves

__all__ = ["ScriptedModule", "scripted_functions_intercepted", "without_scripted"]


@contextmanager
def scripted_functions_intercepted() -> Iterator[None]:
    """Has calls of scripted functions between units go to the active handler."""
    kind: Any = torch.jit.ScriptFunction
    original = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        handler = active_handler()
        if handler is None or not handler.intercepts:
            return original(function, *args, **kwargs)
        with plain_torch():
            return handler.operation(_Scripted(function), args, kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


@dataclass(frozen=True, slots=True)
class _Scripted:
    """A scripted function as an operation: equal for all calls of one function."""

    function: Any

    @property
    def __name__(self) -> str:
        return str(self.function.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        _refuse_fakes((args, kwargs))
        return self.function(*args, **kwargs)


def _refuse_fakes(arguments: Any) -> None:
    """Raises what tells a trace that it needs random data."""
    if any(isinstance(item, FakeTensor) for item in leaves(arguments)):
        failure: Any = UnsupportedOperatorException
        raise failure("TorchScript")


class _Part(nn.Module):
    """The parameters and buffers of a scripted module, under their names."""

    def __init__(self, scripted: Any, parts: dict[int, "_Part"]):
        super().__init__()
        parts[id(scripted)] = self
        for name, parameter in scripted._parameters.items():
            known = parameter is None or isinstance(parameter, nn.Parameter)
            # Those of a loaded module are no parameters to Python.
            own = parameter if known else nn.Parameter(parameter.detach(), parameter.requires_grad)
            self.register_parameter(name, own)
        for name, buffer in scripted._buffers.items():
            self.register_buffer(name, buffer)
        self.training = scripted.training
        for name, inner in scripted._modules.items():
            self._modules[name] = parts.get(id(inner)) or _Part(inner, parts)


class ScriptedModule(_Part):
    """Replaces a TorchScript module in a model, and calls it.

    The scripted module itself has its tensors only while it is called. Else there would be two owners, of
    which one would never learn that a tensor has been released or replaced.
    """

    _scripted: Any

    def __init__(self, scripted: Any):
        super().__init__(scripted, {})
        vars(self)["_scripted"] = scripted
        self._take_back()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the scripted module; between units, that is one operation."""
        handler = active_handler()
        if handler is None or not handler.intercepts:
            return self.call(*args, **kwargs)
        with plain_torch():
            return handler.operation(self.call, args, kwargs)

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Lends the scripted module its tensors for a call."""
        _refuse_fakes((args, kwargs, list(self.parameters()), list(self.buffers())))
        for part, scripted in self._pairs():
            if scripted.training != part.training:
                scripted.training = part.training
            for name, tensor in _tensors(part):
                scripted._c.setattr(name, tensor)
        try:
            return self._scripted(*args, **kwargs)
        finally:
            self._take_back()

    def _pairs(self) -> Iterator[tuple[nn.Module, Any]]:
        return zip(self.modules(), self._scripted.modules(), strict=True)

    def _take_back(self) -> None:
        nothing = torch.empty(0)
        for part, scripted in self._pairs():
            for name, tensor in _tensors(part):
                now = scripted._c.getattr(name)
                if now is not tensor and name in part._buffers:
                    part._buffers[name] = now  # its code has made another one
                scripted._c.setattr(name, nothing)


def _tensors(part: nn.Module) -> list[tuple[str, Tensor]]:
    every = [*part._parameters.items(), *part._buffers.items()]
    return [(name, tensor) for name, tensor in every if tensor is not None]


def without_scripted(module: nn.Module) -> nn.Module:
    """Replaces each scripted module by a `ScriptedModule`, and returns the resulting model."""
    known: dict[int, nn.Module] = {}

    def replaced(inner: nn.Module) -> nn.Module:
        if id(inner) not in known:
            known[id(inner)] = ScriptedModule(inner)
        return known[id(inner)]

    if isinstance(module, torch.jit.ScriptModule):
        return replaced(module)
    for outer in list(module.modules()):
        if not isinstance(outer, torch.jit.ScriptModule):
            for name, inner in outer._modules.items():
                if isinstance(inner, torch.jit.ScriptModule):
                    outer._modules[name] = replaced(inner)
    return module

"""Protects a model during a trace, and locates the module where a trace failed."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwright.torch.interception.glue import Handler, active_handler
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.container_content import content_of, has_content, put_content, versions_of
from shardwright.torch.pytorch.module_hooks import hook_registries
from shardwright.torch.pytorch.module_tree import OF_EVERY_MODULE

__all__ = ["Attributes", "OpenModules", "Unchanged"]


class Attributes:
    """What the attributes of a module and of all modules inside it are, to be put back later."""

    def __init__(self, module: nn.Module):
        self._saved: list[tuple[nn.Module, dict[str, Any], list[tuple[Any, Any]]]] = []
        self._versions: dict[int, dict[str, tuple[int, ...]]] = {}
        for sub in module.modules():
            attributes = dict(sub.__dict__)
            self._versions[id(sub)] = {
                k: versions_of(v) for k, v in attributes.items() if k not in OF_EVERY_MODULE
            }
            containers = [(v, c) for v in attributes.values() if (c := content_of(v)) is not None]
            self._saved.append((sub, attributes, containers))

    @property
    def hooks_were_added(self) -> bool:
        """Whether there are hooks now that were not there."""
        for module, _, containers in self._saved:
            hooks = [id(registry) for registry in hook_registries(module)]
            if any(id(c) in hooks and c.keys() - content.keys() for c, content in containers):
                return True
        return False

    @property
    def changed(self) -> list[tuple[nn.Module, str]]:
        """What is another object now, a container with other things in it, or tensors with other values."""
        found = []
        for module, before, containers in self._saved:
            contents = {id(container): content for container, content in containers}
            for key in dict.fromkeys([*before, *vars(module)]):
                value = vars(module).get(key)
                if key in OF_EVERY_MODULE:
                    continue
                same = value is before.get(key) and (key in before) == (key in vars(module))
                same = same and has_content(value, contents.get(id(value)))
                if not same or versions_of(value) != self._versions[id(module)][key]:
                    found.append((module, key))
        return found

    @property
    def new_tensors(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Attributes that hold another tensor now."""
        return [
            (module, key, value)
            for module, before, _ in self._saved
            for key, value in vars(module).items()
            if isinstance(value, Tensor) and value is not before.get(key)
        ]

    def restore(self) -> None:
        """Takes back what was written since."""
        for module, attributes, containers in self._saved:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for container, content in containers:
                put_content(container, content)


@dataclass(frozen=True, slots=True)
class _Kept:
    """A tensor as it was: what it is, where its memory is, and what is in it.

    Attributes:
        tensor: may be written to, and given another shape, type or memory.
        alias: of the memory, shape and type that it had.
        content: that it had.
        nbytes: of its memory: `resize_` may make that larger, in place.
    """

    tensor: Tensor
    alias: Tensor
    content: Tensor
    nbytes: int

    @classmethod
    def of(cls, tensor: Tensor) -> "_Kept":
        """As it is now."""
        return cls(tensor, tensor.detach(), tensor.clone(), tensor.untyped_storage().nbytes())

    def restore(self) -> None:
        """Makes it what it was."""
        tensor, alias = self.tensor, self.alias
        if _placed(tensor) != _placed(alias) or alias.untyped_storage().nbytes() != self.nbytes:
            alias.untyped_storage().resize_(self.nbytes)
            tensor.data = alias
        if not torch.equal(tensor, self.content):
            tensor.copy_(self.content)


def _placed(tensor: Tensor) -> tuple[Any, ...]:
    """What a tensor is, and where in which memory."""
    return (
        tensor.untyped_storage()._cdata,
        tensor.dtype,
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
    )


class Unchanged:
    """Keeps a model as it is while it is traced.

    Lends fake tensors to all modules in place of their parameters, and to units in place of their
    buffers: they need no memory, and nothing can change the real ones. Buffers outside of units stay, because
    free operations compute with them; zeros stand for those without data. Afterwards takes back what forwards
    wrote to attributes of modules, which would leave fake tensors there, and to buffers outside of units.

    Args:
        unit_map: the model and its units.
        lend: makes a fake tensor for a parameter or buffer.
        device: where free operations compute.

    Attributes:
        left_hooks: at the end there were forward hooks that were not there at the start.
        changed: attributes that were changed.
        left_in_units: those of modules inside units.
    """

    def __init__(self, unit_map: UnitMap, lend: Callable[[Tensor], Tensor], *, device: torch.device):
        self._unit_map = unit_map
        self._device = device
        self._make = lend
        self._attributes: Attributes | None = None
        self._lent: dict[int, Tensor] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self._buffers: list[_Kept] = []
        self.left_hooks = False
        self.changed: list[tuple[nn.Module, str]] = []
        self.left_in_units: list[tuple[nn.Module, str]] = []
        self._in_units = {id(sub) for unit in unit_map.modules.values() for sub in unit.modules()}

    def __enter__(self) -> None:
        self._attributes = Attributes(self._unit_map.model)
        self._gradients = [(p, p.grad) for p in self._unit_map.model.parameters() if p.is_leaf]
        for module in self._unit_map.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = self._lend(parameter)  # type: ignore[assignment]
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(module) in self._in_units:
                    module._buffers[key] = self._lend(buffer)
                elif buffer.is_meta:
                    module._buffers[key] = torch.zeros_like(buffer, device=self._device)
                else:
                    self._buffers.append(_Kept.of(buffer))

    def __exit__(self, *exc_info: object) -> None:
        for kept in self._buffers:
            kept.restore()
        assert self._attributes is not None
        self.left_hooks = self._attributes.hooks_were_added
        self.changed = self._attributes.changed
        self.left_in_units = [(m, key) for m, key in self.changed if id(m) in self._in_units]
        self._attributes.restore()
        for parameter, gradient in self._gradients:
            if (
                parameter.grad is not gradient
            ):  # of a module that holds its parameters elsewhere, as Keras does
                parameter.grad = gradient

    def _lend(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._lent:
            self._lent[id(tensor)] = self._make(tensor)
        return self._lent[id(tensor)]


class OpenModules:
    """Knows which modules are being called, from the outermost to the innermost; units are not entered."""

    def __init__(self, handler: Handler):
        self._handler = handler
        self._open: list[nn.Module] = []
        self._handles: list[Any] = []
        self.at_failure: tuple[nn.Module, ...] = ()

    def __enter__(self) -> None:
        self._handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def __exit__(self, *exc_info: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: nn.Module, args: Any) -> None:
        if active_handler() is self._handler:
            self._open.append(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._open and self._open[-1] is module:
            if sys.exc_info()[0] is not None and not self.at_failure:
                self.at_failure = tuple(self._open)
            self._open.pop()

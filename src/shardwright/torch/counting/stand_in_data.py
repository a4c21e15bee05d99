"""Stand-ins of a trace: random data for a call, a model's tensors without data."""

import copy
import math
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from shardwright.torch.interception.glue import Handler, active_handler
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.pytorch.tensors import Replacing, TensorContents, copy_of_object, has_content
from shardwright.torch.tensor_parallel.divided_tensor import DividedTensor


def random_like(leaf: Any, device: torch.device) -> Any:
    """Random numbers of the same shape and type; zeros for whole numbers, which may be indices."""
    if not isinstance(leaf, Tensor):
        return copy_of_object(leaf, lambda tensor: random_like(tensor, device))
    if leaf.dtype is torch.bool:
        return torch.ones(leaf.shape, dtype=torch.bool, device=device)
    if not leaf.is_floating_point() and not leaf.is_complex():
        return torch.zeros(leaf.shape, dtype=leaf.dtype, device=device)
    tensor = torch.randn(leaf.shape, dtype=leaf.dtype, device=device)
    return tensor.requires_grad_() if leaf.requires_grad else tensor


def copy_of_module(
    module: nn.Module,
    device: torch.device,
    *,
    originals: Mapping[int, Tensor] | None = None,
    shared: Iterable[Any] = (),
    stands_for: Callable[[Tensor, Tensor], None] = lambda own, tensor: None,
) -> nn.Module:
    """A copy with weights of its own: random where the module has none."""
    memo: dict[int, Any] = {id(item): item for item in shared}
    for identifier, tensor in (originals or {}).items():
        memo[identifier] = _own(tensor, device)

    def replaced(tensor: Tensor) -> Tensor:
        # What a forward left in the module: `deepcopy` refuses tensors that were computed.
        if type(tensor) in (Tensor, nn.Parameter, DividedTensor) and tensor.grad_fn is None:
            same: Tensor = copy.deepcopy(tensor, memo)
            return same
        own: Tensor = random_like(tensor, device).detach()
        stands_for(own, tensor)
        return own

    with Replacing(replaced):
        twin = copy.deepcopy(module, memo)
    for sub in twin.modules():
        for registry in (sub._parameters, sub._buffers):
            for key, own in registry.items():
                if own is not None and own.device != device:
                    registry[key] = _own(own, device)  # type: ignore[assignment]
    return twin


def _own(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; random numbers for a tensor without memory."""
    if not tensor.is_meta:
        own = tensor.detach().to(device, copy=True)
    elif tensor.is_floating_point():
        own = torch.randn(tensor.shape, dtype=tensor.dtype, device=device) * 0.02
    else:
        own = torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
    return nn.Parameter(own, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else own


class LentTensors:
    """Lends fake tensors to a model while it is traced.

    All modules get them in place of their parameters, and units in place of their buffers: they need no
    memory, and nothing can change the real ones. Buffers outside of units stay, because free operations
    compute with them, and get their content back at the end; zeros stand for those without data.
    """

    def __init__(self, unit_map: UnitMap, lend: Callable[[Tensor], Tensor], *, device: torch.device):
        self._unit_map = unit_map
        self._device = device
        self._make = lend
        self._own: list[tuple[dict[str, Any], dict[str, Any]]] = []  # a registry, and what was in it
        self._lent: dict[int, Tensor] = {}
        self._gradients: list[tuple[nn.Parameter, Tensor | None]] = []
        self._buffers = TensorContents(math.inf)

    def __enter__(self) -> None:
        in_units = {id(sub) for unit in self._unit_map.modules.values() for sub in unit.modules()}
        self._gradients = [(p, p.grad) for p in self._unit_map.model.parameters() if p.is_leaf]
        for module in self._unit_map.model.modules():
            registries: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
            self._own += [(registry, {**registry}) for registry in registries]
            for key, parameter in module._parameters.items():
                if parameter is not None:
                    module._parameters[key] = self._lend(parameter)  # type: ignore[assignment]
            for key, buffer in module._buffers.items():
                if buffer is None:
                    continue
                if id(module) in in_units:
                    module._buffers[key] = self._lend(buffer)
                elif buffer.is_meta:
                    module._buffers[key] = torch.zeros_like(buffer, device=self._device)
                elif has_content(buffer):
                    self._buffers.keep(buffer)

    def __exit__(self, *exc_info: object) -> None:
        self._buffers.restore()
        for registry, own in self._own:
            registry.clear()
            registry.update(own)
        for parameter, gradient in self._gradients:
            # That of a module that holds its parameters elsewhere, as Keras does.
            if parameter.grad is not gradient:
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

"""A whole model on the host of a rank, from its state: what ``model.cpu()`` makes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.interception.glue import restore_calls


def gather_on_host(module: nn.Module, state: Mapping[str, Any]) -> None:
    """Gives a module all of its parameters and buffers, on the host; takes its calls back to itself."""
    made: dict[int, Any] = {}
    for path, sub in module.named_modules():
        prefix = f"{path}." if path else ""
        for key, parameter in sub._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    values = _on_host(state[prefix + key])
                    made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                sub._parameters[key] = made[id(parameter)]
        for key, buffer in sub._buffers.items():
            if buffer is not None:
                if id(buffer) not in made:
                    made[id(buffer)] = _on_host(state[prefix + key])
                sub._buffers[key] = made[id(buffer)]
    for sub in list(module.modules()):
        restore_calls(sub)


def transient_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers of this rank that no state has, by their names."""
    return {
        f"{path}.{key}" if path else key: _on_host(sub._buffers[key])
        for path, sub in module.named_modules()
        for key in sub._non_persistent_buffers_set
        if sub._buffers.get(key) is not None and not sub._buffers[key].is_meta
    }


def _on_host(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)

"""Mixed precision: 16-bit parameters and activations, float32 gradients and updates.

::

    parameters, activations         16 bits
    gradients, summed               float32, from the first microbatch on
    what the optimizer updates      float32 copies, rounded into the parameters after each update
"""

from typing import Any

import torch
from torch import Tensor, nn

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.torch._private import put_in_place
from shardwright.torch.parameters.delayed_initialization import cast_recorded
from shardwright.torch.pytorch.tree import map_tree

_LOW = (torch.bfloat16, torch.float16)


def low_precision(config: Config) -> torch.dtype | None:
    """The 16-bit type that the settings ask for; None where they ask for none."""
    if config.bf16:
        return torch.bfloat16
    return torch.float16 if config.fp16 else None


def cast_model(model: nn.Module, dtype: torch.dtype) -> None:
    """Casts parameters and buffers, which stay the same objects, and has gradients come in float32."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_complex():
            raise UsageError(
                f"{name} is {tensor.dtype}, and bf16 and fp16 cast real numbers only. Leave them out, or "
                "cast the other modules of the model with module.bfloat16()."
            )
    for parameter in model.parameters():
        cast = cast_recorded(parameter, dtype) if parameter.is_floating_point() else None
        if cast is not None:
            put_in_place(parameter, nn.Parameter(cast, parameter.requires_grad))
    model.to(dtype)
    for parameter in model.parameters():
        if parameter.dtype is dtype:
            set_gradient_dtype(parameter, torch.float32)


def gradient_dtype(parameter: Tensor) -> torch.dtype:
    """The type of a parameter's gradient."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Sets the type of a parameter's gradient."""
    if gradient_dtype(parameter) is not dtype:
        parameter.grad_dtype = dtype


def is_low(tensor: Tensor) -> bool:
    """Whether its numbers have 16 bits."""
    return tensor.dtype in _LOW


def cast_inputs(given: Any, dtype: torch.dtype) -> Any:
    """Casts floating-point tensors for a model in 16 bits."""

    def cast(item: Any) -> Any:
        return item.to(dtype) if isinstance(item, Tensor) and item.is_floating_point() else item

    return map_tree(cast, given)


def cast_outputs(result: Any) -> Any:
    """Casts the outputs of a 16-bit model to float32, for losses and metrics."""

    def cast(item: Any) -> Any:
        return item.float() if isinstance(item, Tensor) and item.dtype in _LOW else item

    return map_tree(cast, result)

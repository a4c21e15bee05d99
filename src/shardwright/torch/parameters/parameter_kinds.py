"""Kinds of parameters and buffers, and their types: which are remade, sent, sharded, moved, in 16 bits.

::

    parameters, activations         16 bits
    gradients, summed               float32, from the first microbatch on
    what the optimizer updates      float32 copies, rounded into the parameters after each update

Observers of quantisation-aware training change them, and so do statistics sized by the first batch. A
checkpoint records the original form of each such buffer, so that a run resumes with the saved one::

    built     scale: (1,)                  built     scale: (1,)     as it was at first when it was saved
    trained   scale: (16,)   ── saved ──>  resumed   scale: (16,)

A buffer of another original shape belongs to another model.

Code that computes reads parameters as attributes of modules (``self.weight``), which PyTorch looks up in
``module._parameters``. The watch waits there for the parameter's rows, so that the code finds an ordinary
parameter.
"""

import copy
import itertools
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.torch._private.tensors import put_in_place
from shardwright.torch.parameters.delayed_initialization import cast_recorded
from shardwright.torch.pytorch.functions import RELEASED
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
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
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


@dataclass(frozen=True, slots=True)
class BufferKind:
    """The form of a buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> "BufferKind":
        """The form of a tensor."""
        return cls(tuple(tensor.shape), tensor.dtype)

    def is_of(self, tensor: Tensor) -> bool:
        """Whether a tensor is that; asked in every step."""
        return tensor.dtype is self.dtype and tensor.shape == self.shape

    def to_json(self) -> list[Any]:
        return [str(self.dtype).removeprefix("torch."), *self.shape]

    @classmethod
    def from_json(cls, content: list[Any]) -> "BufferKind | None":
        """The reverse of `to_json`; None for anything else."""
        name, *shape = content or [None]
        dtype = getattr(torch, name, None) if isinstance(name, str) else None
        if not isinstance(dtype, torch.dtype) or not all(type(size) is int and size >= 0 for size in shape):
            return None
        return cls(tuple(shape), dtype)


def first_kinds(model: nn.Module) -> dict[str, BufferKind]:
    """The current forms of a model's buffers, by name."""
    return {name: BufferKind.of(buffer) for name, buffer in model.named_buffers(remove_duplicate=False)}


_OF_GLOO = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex128,
        torch.complex64,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
        torch.bool,
    }
)


def refuse_unsendable(module: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Refuses a model with a type that the replicas' process group cannot send."""
    if group is None or dist.get_backend(group) != "gloo":
        return
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dtype not in _OF_GLOO:
            raise UsageError(
                f"{name} is {tensor.dtype}, and the replicas send one another their parameters through gloo, "
                "which lacks this type. Leave out ddp_dist_backend and shared_memory, so that Shardwright's "
                "own collectives send it; or cast it."
            )


def can_be_sharded(parameter: Tensor, *, threshold: int) -> bool:
    """Whether a parameter is cut, or left whole on every rank."""
    return (
        parameter.dim() > 0
        and parameter.numel() >= max(threshold, 1)
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
    )


Arrive = Callable[[Any], None]


class _WatchedParameters(dict[str, Any]):
    """The parameters of a module, of which some may be still to come."""

    def __init__(self, plain: MutableMapping[str, Any], to_come: dict[int, Any], arrive: Arrive):
        super().__init__(plain)
        self._to_come = to_come
        self._arrive = arrive

    def __getitem__(self, key: str) -> Any:
        found = super().__getitem__(key)
        if self._to_come:
            self._wait_for(found)
        return found

    def get(self, key: str, default: Any = None) -> Any:
        try:
            return self[key]
        except KeyError:
            return default

    def _wait_for(self, parameter: Any) -> None:
        what = self._to_come.get(id(parameter))
        if what is not None:
            self._arrive(what)

    def __copy__(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return copy.deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def watch_parameters(module: nn.Module, to_come: dict[int, Any], arrive: Arrive) -> None:
    if module._parameters:
        module.__dict__["_parameters"] = _WatchedParameters(module._parameters, to_come, arrive)


def move_to(model: nn.Module, device: torch.device) -> None:
    """Moves the parameters and buffers whose values this rank has; the script's references to them hold."""
    moved = set()
    for tensor in itertools.chain(model.parameters(), model.buffers()):
        if tensor.is_meta or hasattr(tensor, RELEASED) or tensor.device == device:
            continue
        gradient = tensor.grad
        if gradient is not None:
            tensor.grad = None
        tensor.data = tensor.data.to(device)
        moved.add(id(tensor))
        if gradient is not None:
            tensor.grad = gradient.to(device)
    for module in model.modules():
        if isinstance(module, nn.RNNBase) and all(id(each) in moved for each in module.parameters(False)):
            module.flatten_parameters()  # cuDNN wants them in one piece of memory

"""Counts what a traced call costs: FLOPs, bytes kept for the backward, random draws, parameters touched."""

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwright.torch._private import FakeTensor, storage_key
from shardwright.torch.deferred import spec_of

__all__ = ["CostCounter", "class_key", "cost_class"]

aten = torch.ops.aten


class CostCounter(TorchDispatchMode):
    """Counts while it is active; enter it inside the fake mode, so that it sees operations first.

    Attributes:
        flops: floating-point operations; a multiply-add counts as two.
        saved_bytes: bytes of distinct storages that autograd keeps, parameters not counted.
        random: random numbers were drawn.
        parameters: names of the parameters and buffers that were read.
        mutated_buffers: a parameter or buffer was changed in place.
    """

    _total = 0

    @staticmethod
    def running_flops() -> int:
        """FLOPs counted so far by all counters: differences tell what happened in between."""
        return CostCounter._total

    def __init__(self, names: Mapping[int, str] | None = None):
        super().__init__()
        self.flops = 0
        self.random = False
        self.parameters: set[str] = set()
        self.mutated_buffers = False
        self._names = names or {}
        self._saved: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def saved_bytes(self) -> int:
        """Bytes kept for the backward."""
        return sum(self._saved.values())

    def __enter__(self) -> "CostCounter":
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        super().__exit__(*exc_info)
        self._hooks.__exit__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._note_parameters(func, args)
        result = func(*args, **kwargs)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.random = True
        count = _FLOPS.get(func.overloadpacket)
        if count is not None:
            flops = int(count(*args, **kwargs, out_val=result))
            self.flops += flops
            CostCounter._total += flops
        return result

    def _note_parameters(self, func: Any, args: Any) -> None:
        if not self._names:
            return
        for position, arg in enumerate(args):
            for tensor in arg if isinstance(arg, list | tuple) else (arg,):
                name = self._names.get(id(tensor)) if isinstance(tensor, Tensor) else None
                if name is None:
                    continue
                self.parameters.add(name)
                schema = func._schema.arguments
                alias = schema[position].alias_info if position < len(schema) else None
                if alias is not None and alias.is_write:
                    self.mutated_buffers = True

    def _pack(self, tensor: Tensor) -> Tensor:
        base = tensor._base if tensor._is_view() and tensor._base is not None else tensor
        # Parameters are real, or views of real ones; whatever a forward made is fake.
        if isinstance(base, FakeTensor) and not isinstance(base, nn.Parameter):
            self._saved[storage_key(tensor)] = tensor.untyped_storage().nbytes()
        return tensor


def _attention_flops(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Two batched matrix products: queries by keys, weights by values.

    FlopCounterMode has no entry for attention on CPU and counts nothing. A causal mask is counted in full, as the
    kernels for which torch has formulas do.
    """
    query_BHSD, key_BHTD, value_BHTE = args[:3]
    *batch, seq_q, dim = query_BHSD.shape
    pairs = math.prod(batch) * seq_q * key_BHTD.shape[-2]
    return int(2 * pairs * (dim + value_BHTE.shape[-1]))


def _attention_packets() -> list[Any]:
    names = (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    return [getattr(aten, name) for name in names if hasattr(aten, name)]


_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **dict.fromkeys(_attention_packets(), _attention_flops),
}


def class_key(module: nn.Module) -> str:
    """A hash that is equal for modules of the same classes with parameters of the same shapes and types."""
    rows = []
    for name, sub in module.named_modules():
        own = [(n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in sub.named_parameters(recurse=False)]
        buffers = [(n, tuple(b.shape), str(b.dtype)) for n, b in sub.named_buffers(recurse=False)]
        rows.append((name, type(sub).__qualname__, sub.extra_repr(), sub.training, own, buffers))
    return hashlib.sha256(repr(rows).encode()).hexdigest()[:12]


def cost_class(module: nn.Module, fakes: list[Any]) -> str:
    """Key of calls that cost the same: same kind of module, same shapes of inputs.

    Args:
        module: the unit.
        fakes: leaves of the arguments; tensors count with shape and type, other things with their text.
    """
    inputs = [_describe(item) for item in fakes]
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()[:8]
    return f"{type(module).__name__}-{class_key(module)}-{digest}"


def _describe(item: Any) -> str:
    if isinstance(item, Tensor):
        return str(spec_of(item))
    if item is None or isinstance(item, bool | int | float | str):
        return repr(item)
    return type(item).__qualname__

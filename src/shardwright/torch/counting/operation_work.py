"""The work of a single operation: FLOPs, bytes moved, kernels."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from shardwright.work import Work

__all__ = ["attention_flops", "flops_of", "tensors_in", "work_of"]

aten = torch.ops.aten

_MOVE_NOTHING = frozenset({aten._unsafe_view, aten.alias, aten.empty, aten.empty_like, aten.lift_fresh})
"""Operations that launch no kernel, beside the views."""

_GATHERS = frozenset({aten.embedding, aten.index_select, aten.gather, aten.index})
"""Operations that read as much as they write, however large what they read from is."""


def tensors_in(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, and in lists among them."""
    for argument in arguments:
        for item in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(item, Tensor):
                yield item


def flops_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any) -> int:
    """The floating-point operations of an operation; a multiply-add counts as two."""
    count = _FLOPS.get(func.overloadpacket)
    return 0 if count is None else int(count(*args, **kwargs, out_val=result))


def attention_flops(*args: Any, out_val: Any, **kwargs: Any) -> int:
    """Two batched matrix products: queries by keys, weights by values.

    FlopCounterMode has no entry for attention on CPU and counts nothing. A causal mask is counted in full,
    as the kernels for which torch has formulas do.
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


def work_of(func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, flops: int) -> Work:
    """Counts what one operation computes and moves; nothing for views."""
    written = list(tensors_in((result,)))
    if getattr(func, "is_view", False) or func.overloadpacket in _MOVE_NOTHING or not written:
        return Work()
    if func.overloadpacket in _ATTENTION:
        # A causal mask hides half of what it is counted for.
        seen = flops / 2 if _argument(func, args, kwargs, "is_causal") else flops
        return Work(kernels=1, attention_flops=seen)
    read = written if func.overloadpacket in _GATHERS else tensors_in((*args, *kwargs.values()))
    num_bytes = sum(tensor.nbytes for tensor in (*read, *written) if tensor.layout is torch.strided)
    if flops:
        return Work(products=1, product_flops=flops, product_bytes=num_bytes / 2)
    return Work(kernels=1, moved_bytes=num_bytes)


def _argument(func: Any, args: Any, kwargs: Mapping[str, Any], name: str) -> Any:
    """The argument of an operation under a name of its schema; None if it is left out."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index(name) if name in names else len(args)
    return args[at] if at < len(args) else kwargs.get(name)


_ATTENTION = frozenset(_attention_packets())

_FLOPS: dict[Any, Callable[..., int]] = {
    **flop_registry,
    **dict.fromkeys(_ATTENTION, attention_flops),
}

"""Chooses the kernel of an attention, and calls it.

::

    flash        PyTorch's scaled_dot_product_attention with a fused kernel
    efficient      (on CUDA the one that PyTorch prefers of those that take the inputs)
    cudnn
    blockwise    our own, where PyTorch would keep all scores
    plain        PyTorch's kernel that keeps all scores, where the script wants it
    PyTorch      its own choice, which we do not see: compiled code, transforms of torch.func

Shapes: B samples, H heads, G heads of keys (H is a multiple), Q queries, K keys, D channels of a query and a
key, E channels of a value.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright.torch._private.tensors import FakeTensor, attention_kernel, function_transforms_active
from shardwright.torch.attention.blockwise import Seen, blockwise_attention

_FUSED_ON_CPU = frozenset({torch.float32, torch.float64, torch.bfloat16, torch.float16})


@dataclass(frozen=True, slots=True)
class Choice:
    """A kernel.

    Attributes:
        why_not_fused: what a fused kernel does not take; empty where it is one.
    """

    kernel: str
    why_not_fused: str = ""


@dataclass(frozen=True, slots=True)
class Attention:
    """What an attention computes, but for its tensors.

    Attributes:
        seen: which keys a query sees by its position.
        hidden_score: added to a score where a mask of booleans is False.
    """

    scale: float
    seen: Seen = Seen()  # noqa: RUF009
    dropout: float = 0.0
    hidden_score: float = float("-inf")


class _Traces:
    """Traces in progress on a CPU that stand for runs on accelerators."""

    for_accelerators = 0


@contextmanager
def traced_for_accelerators() -> Iterator[None]:
    """Has attention on CPUs counted as a fused kernel of an accelerator, which takes dropout and masks."""
    _Traces.for_accelerators += 1
    try:
        yield
    finally:
        _Traces.for_accelerators -= 1


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    attention: Attention,
    *,
    wanted: Choice | None = None,
) -> tuple[Tensor, Choice]:
    """Attends by the best kernel that keeps no scores; returns (B, H, Q, E), and what computed it."""
    query, key, value, mask = _as_autocast(query, key, value, mask)
    attention = replace(attention, seen=attention.seen.simplified(query.shape[2], key.shape[2]))
    choice = wanted or choose(query, key, value, mask, attention)
    return _CALLS[choice.kernel](query, key, value, mask, attention), choice


def choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention) -> Choice:
    """The kernel for an attention; the same for tensors without data."""
    if torch.compiler.is_compiling() or function_transforms_active():
        return Choice("PyTorch")
    refused = _refused_everywhere(query, key, value, mask, attention)
    if refused:
        return Choice("blockwise", refused)
    if query.device.type == "cuda":
        return _choice_on_cuda(query, key, value, mask, attention)
    if query.device.type != "cpu":
        return Choice("PyTorch")
    if _Traces.for_accelerators:
        return Choice("flash")
    refused = _refused_on_cpu(query, mask, attention)
    return Choice("blockwise", refused) if refused else Choice("flash")


def _refused_everywhere(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention
) -> str:
    """What no kernel of PyTorch takes; empty for nothing."""
    types = {tensor.dtype for tensor in (query, key, value)}
    if len(types) > 1:
        return f"types of {' and '.join(sorted(map(_name_of, types)))}"
    if query.shape[-1] != value.shape[-1]:
        return f"heads of {query.shape[-1]} channels, values of {value.shape[-1]}"
    if attention.seen.window is not None:
        return f"a window of {attention.seen.window} keys"
    if attention.seen.causal and (attention.seen.shift or mask is not None):
        return "a causal mask besides another" if mask is not None else "queries after earlier keys"
    return ""


def _refused_on_cpu(query: Tensor, mask: Tensor | None, attention: Attention) -> str:
    if query.dtype not in _FUSED_ON_CPU:
        return f"{_name_of(query.dtype)} on a CPU"
    if attention.dropout:
        return "dropout on a CPU"
    if mask is not None and (mask.dtype is torch.bool or mask.requires_grad):
        # The kernel takes booleans, but every layer would keep a copy as numbers.
        return "a mask with gradients" if mask.requires_grad else "a mask of booleans on a CPU"
    return ""


def _choice_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention
) -> Choice:
    if not _takes_groups(query, mask):
        key, value = _each_head(query, key), _each_head(query, value)
    numbers, causal = _as_numbers(mask, query, attention), attention.seen.causal
    grouped = query.shape[1] != key.shape[1]
    params: Any = SDPAParams(query, key, value, numbers, attention.dropout, causal, grouped)
    usable = [name for name, can_use in _ON_CUDA if can_use(params)]
    if usable and isinstance(query, FakeTensor):
        return Choice(usable[0])
    if usable:
        given = (query, key, value, numbers)
        return Choice(attention_kernel(given, dropout=attention.dropout, causal=causal, grouped=grouped))
    masked = "" if mask is None else ", a mask"
    return Choice("blockwise", f"{_name_of(query.dtype)}, heads of {query.shape[-1]} channels{masked}")


_ON_CUDA: tuple[tuple[str, Callable[..., bool]], ...] = (
    ("flash", can_use_flash_attention),
    ("efficient", can_use_efficient_attention),
    ("cudnn", can_use_cudnn_attention),
)


def _by_pytorch(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention
) -> Tensor:
    mask = _as_numbers(mask, query, attention)
    seen, causal = attention.seen, attention.seen.causal
    if seen.causal and (seen.window is not None or seen.shift or mask is not None):
        rows, keys = range(query.shape[2]), range(key.shape[2])
        hidden = seen.hidden(rows, keys, query.device)
        assert hidden is not None
        numbers = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device)
        numbers = numbers.masked_fill(hidden, seen.score_beyond)
        mask, causal = numbers if mask is None else mask + numbers, False
    if not _takes_groups(query, mask):
        key, value = _each_head(query, key), _each_head(query, value)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=attention.dropout,
        is_causal=causal,
        scale=attention.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _by_blocks(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention
) -> Tensor:
    return blockwise_attention(
        query,
        _each_head(query, key),
        _each_head(query, value),
        scale=attention.scale,
        mask=mask,
        seen=attention.seen,
        dropout=attention.dropout,
        hidden_score=attention.hidden_score,
    )


def _plainly(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, attention: Attention) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _by_pytorch(query, key, value, mask, attention)


_CALLS: dict[str, Callable[..., Tensor]] = {
    "blockwise": _by_blocks,
    "plain": _plainly,
    **dict.fromkeys(("flash", "efficient", "cudnn", "math", "PyTorch"), _by_pytorch),
}


def _takes_groups(query: Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch has a fused kernel for fewer heads of keys than of queries."""
    return mask is None and query.shape[-1] <= 256


def _each_head(query: Tensor, shared: Tensor) -> Tensor:
    """(B, H, K, ·): keys or values, once for each head of the queries."""
    times = query.shape[1] // shared.shape[1]
    return shared if times == 1 else shared.repeat_interleave(times, dim=1)


def _as_numbers(mask: Tensor | None, query: Tensor, attention: Attention) -> Tensor | None:
    """A mask as the fused kernels take it: booleans mean minus infinity to them, and perhaps not here."""
    if mask is None or (mask.dtype is torch.bool and attention.hidden_score == float("-inf")):
        return mask
    if mask.dtype is not torch.bool:
        return mask.to(query.dtype)
    lowest = max(attention.hidden_score, torch.finfo(query.dtype).min)
    return torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill(~mask, lowest)


def _as_autocast(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The tensors in the type that PyTorch's attention would give them."""
    device = query.device.type
    if not torch.is_autocast_enabled(device) or query.dtype is torch.float64:
        return query, key, value, mask
    dtype = torch.get_autocast_dtype(device)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    return query.to(dtype), key.to(dtype), value.to(dtype), mask


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

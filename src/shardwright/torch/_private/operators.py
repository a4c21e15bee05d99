"""Operators: how they are called, and what they are made of."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._ops import HigherOrderOperator

__all__ = [
    "HigherOrderOperator",
    "attention_kernel",
    "attention_kernels_allowed",
    "generator_key",
    "is_composite",
    "packed_call",
]


def packed_call(func: Any) -> Callable[..., Any]:
    """What calls an operator, without the method in Python around it."""
    call: Callable[..., Any] = func._op
    return call


def is_composite(func: Any) -> bool:
    """Whether an operator is made of others: autograd takes it apart, and so does its `decompose`."""
    return bool(func._can_decompose())


def attention_kernel(tensors: Sequence[Any], *, dropout: float, causal: bool, grouped: bool) -> str:
    """The kernel that `scaled_dot_product_attention` takes; public are only those that it could take."""
    query, key, value, mask = tensors
    number = torch._fused_sdp_choice(query, key, value, mask, dropout, causal, enable_gqa=grouped)
    return {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}.get(number, "PyTorch")


def generator_key(generator: torch.Generator) -> int:
    """Equal for all Python objects that stand for one generator: operations are handed new ones."""
    return int(generator._cdata)  # type: ignore[attr-defined]


def attention_kernels_allowed() -> tuple[bool, ...]:
    """Which kernels `torch.nn.attention.sdpa_kernel` has allowed."""
    return (
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
    )

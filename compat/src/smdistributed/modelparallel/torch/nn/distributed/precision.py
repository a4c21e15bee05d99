"""Bits of what goes through a transformer layer."""

import torch
from torch import Tensor


def at_least_32_bits(tensor: Tensor) -> Tensor:
    """The same as float32, unless it has as many bits."""
    return tensor.float() if tensor.dtype.itemsize < torch.float32.itemsize else tensor


def sum_with_residual(result: Tensor, residual: Tensor, *, in_fp32: bool) -> Tensor:
    """What a half of a layer has computed, and what it was given.

    Args:
        in_fp32: the sum is float32 where these have 16 bits, and stays it until the next normalisation: sums
            over many layers overflow in float16.
    """
    return at_least_32_bits(result) + residual if in_fp32 else result + residual

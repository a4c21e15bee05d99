"""Tensors as raw memory, the content of messages and collectives."""

import torch
from torch import Tensor

from shardwright.errors import UsageError

__all__ = ["bytes_of", "flat"]


def bytes_of(tensor: Tensor) -> Tensor:
    """The entries of a tensor, in order, as bytes.

    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single entry counts as contiguous whatever its strides are.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)


def flat(tensor: Tensor, kind: str) -> Tensor:
    """The elements of a tensor as they lie in memory, which must be the same way on all ranks."""
    if not tensor.numel() or (tensor.is_contiguous() and not tensor.is_complex()):
        return tensor.detach().view(-1)
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    expected = 1
    for stride, size in sorted(zip(plain.stride(), plain.shape, strict=True)):
        if size != 1 and stride != expected:
            raise UsageError(
                f"{kind} takes tensors without holes, but this one of shape {tuple(tensor.shape)} has the "
                f"strides {tensor.stride()}. Pass a contiguous copy."
            )
        expected *= size
    return plain.detach().as_strided((plain.numel(),), (1,))

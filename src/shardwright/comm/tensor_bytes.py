"""Tensors as bytes: what a message is made of, whatever the type."""

import torch
from torch import Tensor

__all__ = ["bytes_of"]


def bytes_of(tensor: Tensor) -> Tensor:
    """The entries of a tensor, in order, as bytes.

    Returns:
        (bytes,) uint8, without autograd history; it shares the memory of a tensor that is contiguous and
        neither conjugated nor negated when it is read.

    >>> bytes_of(torch.tensor([1, 258], dtype=torch.int16)).tolist()
    [1, 0, 2, 1]
    """
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # A single entry counts as contiguous whatever its strides are.
    return plain.as_strided((plain.numel(),), (1,)).view(torch.uint8)

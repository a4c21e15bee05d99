"""A tensor that hooks for saved tensors keep as it is: PyTorch checks no versions behind such hooks."""

import torch
from torch import Tensor

__all__ = ["KeptTensor", "refuse_changed", "version_of"]


class KeptTensor:
    """A saved tensor as it is. It must not be changed in place before the backward, as without hooks."""

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: Tensor, *, version: int | None = None):
        # A tensor with its history would keep itself alive.
        self._tensor = tensor.detach()
        self._version = version_of(tensor) if version is None else version

    def get(self) -> Tensor:
        """The tensor, for the backward."""
        refuse_changed(self._tensor, self._version, shape=self._tensor.shape)
        return self._tensor


def version_of(tensor: Tensor) -> int:
    """How often a tensor was changed in place; of inference tensors nobody counts it."""
    return 0 if tensor.is_inference() else tensor._version


def refuse_changed(tensor: Tensor, version: int, *, shape: torch.Size) -> None:
    """Refuses a saved tensor that has changed since, as PyTorch does without hooks."""
    now = version_of(tensor)
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(shape)} and {tensor.dtype} is at version {now}; expected "
            f"version {version} instead."
        )

"""What the tensors of a step are made of: shapes alone, or random numbers where the way depends on values."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shardwright.torch._private import FakeTensor, new_fake_mode, unset_fake_temporarily
from shardwright.torch.tensor_parallel.grouped_products import GroupedProductsOfAllTypes
from shardwright.torch.tensor_parallel.memory_order import is_dense

__all__ = ["Material"]

_SPREAD = 0.02
"""Of random parameters and activations: small enough for deep stacks of products."""


class Material:
    """Makes tensors like others.

    Attributes:
        is_random: they have random numbers, or those of the others where these have data.
    """

    def __init__(self, *, is_random: bool = False):
        self.is_random = is_random
        self._fake = new_fake_mode()
        self._generator = torch.Generator().manual_seed(0)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Operations inside make tensors of this material, and leave the generators as they were."""
        if self.is_random:
            with unset_fake_temporarily(), torch.random.fork_rng(devices=_gpus()):
                torch.manual_seed(0)
                yield
        else:
            with self._fake, GroupedProductsOfAllTypes():  # type: ignore[no-untyped-call]
                yield

    def like(self, tensor: Tensor) -> Tensor:
        """A leaf, or a parameter, like a tensor."""
        if self.is_random:
            with unset_fake_temporarily():
                made = self._with_data(tensor)
        else:
            with self._fake:
                device = _device(tensor)
                made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(made, requires_grad=tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)

    def _with_data(self, tensor: Tensor) -> Tensor:
        if not (tensor.is_meta or isinstance(tensor, FakeTensor)):
            return tensor.detach().clone()
        device = _device(tensor)
        if not tensor.is_floating_point():
            return torch.zeros(tensor.shape, dtype=tensor.dtype, device=device)
        numbers = torch.randn(tensor.shape, generator=self._generator) * _SPREAD
        if not is_dense(tensor.shape, tensor.stride()):
            return numbers.to(device, tensor.dtype)
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return made.copy_(numbers)


def _gpus() -> list[int]:
    """The GPUs whose generators are to be kept: seeding seeds those of all."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [*range(torch.cuda.device_count())] if in_use else []


def _device(tensor: Tensor) -> torch.device:
    """A tensor on the meta device gets its memory in the first step: it is on the CPU, as its inputs are."""
    return torch.device("cpu") if tensor.is_meta else tensor.device

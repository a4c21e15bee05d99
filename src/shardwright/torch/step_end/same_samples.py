"""Tells where all replicas train on the same samples, as a data loader without a sampler gives them.

Nothing is wrong then with what is computed, but replicas beyond the first add nothing. A stream
(`IterableDataset`) knows nothing of ranks, so that it is refused before the first update.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from shardwright.errors import UsageError
from shardwright.run.context import Context
from shardwright.torch.batch.batch import Batch, is_batch_tensor

__all__ = ["SameSamples", "streams_noted"]

log = logging.getLogger(__name__)

_STEPS = 2
_LOOKED_AT = 4096  # elements of a tensor


class _Streams:
    read = False


@contextmanager
def streams_noted() -> Iterator[None]:
    """Notes whether the script reads a stream of samples."""
    original = DataLoader.__iter__

    def iterate(self: DataLoader[Any]) -> Any:
        _Streams.read |= isinstance(self.dataset, IterableDataset)
        return original(self)

    _Streams.read = False
    DataLoader.__iter__ = iterate  # type: ignore[method-assign]
    try:
        yield
    finally:
        DataLoader.__iter__ = original  # type: ignore[method-assign]


class SameSamples:
    """Looks at the batches of the first training steps."""

    def __init__(self, context: Context):
        self._context = context
        self._left = _STEPS if context.mesh.data > 1 else 0

    def digest(self, batch: Batch) -> float:
        """A number for the samples of a batch, below 0 where a stream was read; 0 where nobody looks."""
        if not self._left:
            return 0.0
        tensors = [leaf.detach() for leaf in batch.leaves if is_batch_tensor(leaf) and _has_numbers(leaf)]
        digest = sum((_number(tensor, place) for place, tensor in enumerate(tensors)), 0.0)
        return -abs(digest) if _Streams.read else abs(digest)

    def look(self, digests: Sequence[float], *, step: int) -> UsageError | None:
        """Takes the digests of one step; warns at the last of the first steps, on rank 0."""
        if not self._left:
            return None
        mesh = self._context.mesh
        of_replicas = [digests[ranks[0]] for ranks in mesh.groups("mp")]
        alike = len(set(of_replicas)) == 1 and of_replicas[0] != 0
        self._left = self._left - 1 if alike else 0
        if alike and of_replicas[0] < 0:
            return UsageError(
                f"all {mesh.data} replicas have the same samples in step {step}: the data set of the loader "
                "is an IterableDataset, which every rank reads whole. Give each replica its own part: in its "
                "__iter__, itertools.islice(samples, sw.rdp_rank(), None, sw.rdp_size()), with workers as "
                "parts of that; for datasets of Hugging Face split_dataset_by_node(dataset, sw.rdp_rank(), "
                "sw.rdp_size())."
            )
        if not self._left and alike and self._context.rank == 0:
            log.warning(
                "all %d replicas had the same samples in the first %d steps, so that one replica would do. "
                "Give each its own part of the data: "
                "sw.data_loader(dataset, ...), or sw.distributed_sampler(dataset) in a DataLoader.",
                mesh.data,
                _STEPS,
            )
        return None


def _has_numbers(tensor: Tensor) -> bool:
    return not (tensor.is_complex() or tensor.is_nested or tensor.is_meta)


def _number(tensor: Tensor, place: int) -> float:
    """Equal for equal tensors in the same place of a batch."""
    flat = tensor.to_dense().reshape(-1)
    some = flat[:: max(1, len(flat) // _LOOKED_AT)].double()  # not its begin alone, which may be padding
    weights = torch.linspace(1.0, 2.0, len(some), dtype=torch.float64, device=some.device)
    return float(torch.nan_to_num(some @ weights)) * (place + 1)

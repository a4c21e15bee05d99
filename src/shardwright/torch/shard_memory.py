"""Where the rows of sharded parameters lie, and how all rows come together.

::

    HostMemory      all ranks of the shard group on one host    all rows are there, for all of them
    HostsMemory     on several hosts                            each host gathers those of the others, once
    DeviceMemory    any other ranks (GPUs, gloo)                each rank gathers those of the others
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm._private import all_gather_single
from shardwright.comm.communicator import Communicator
from shardwright.comm.shardwright_process_group import ShardwrightProcessGroup
from shardwright.shard_layout import ShardLayout

__all__ = ["DeviceMemory", "HostMemory", "HostsMemory", "ShardMemory", "memory_for"]

Wait = Callable[[], None]
"""Waits until all rows are there."""


class ShardMemory(Protocol):
    """Memory for some parameters of one type.

    Attributes:
        layout: of the parameters.
        gathers: rows have to be brought together.
    """

    layout: ShardLayout
    gathers: bool

    def whole(self, index: int) -> Tensor:
        """All rows of a parameter; they hold values while they are gathered."""
        ...

    def rows(self, index: int) -> Tensor:
        """The rows of this rank."""
        ...

    def gather(self) -> Wait | None:
        """Starts to bring all rows together; None where they are, as soon as all ranks have met."""
        ...


class HostMemory:
    """Memory that the ranks of a host share; each writes to its own rows.

    Args:
        layout: of the parameters.
        dtype: of the parameters.
        communicator: of the shard group, on one host.
    """

    gathers = False

    def __init__(self, layout: ShardLayout, dtype: torch.dtype, communicator: Communicator):
        self.layout = layout
        self._rank = communicator.rank
        self._memory = communicator.share_memory(layout.whole_size * dtype.itemsize).view(dtype)

    def whole(self, index: int) -> Tensor:
        """All rows of a parameter."""
        return _whole(self._memory, self.layout, index)

    def rows(self, index: int) -> Tensor:
        """The rows of this rank, a part of all."""
        rows = self.layout.rows(index, self._rank)
        return self.whole(index)[rows.start : rows.stop]

    def gather(self) -> Wait | None:
        """They are there."""
        return None


class HostsMemory:
    """Every rank has its rows; all rows come to memory that the ranks of a host share.

    Args:
        layout: of the parameters.
        dtype: of the parameters.
        communicator: of the shard group.
    """

    gathers = True

    def __init__(self, layout: ShardLayout, dtype: torch.dtype, communicator: Communicator):
        self.layout = layout
        self._communicator = communicator
        self._memory = communicator.share_memory(layout.whole_size * dtype.itemsize).view(dtype)
        self._rows = torch.zeros(layout.shard_size, dtype=dtype)

    def whole(self, index: int) -> Tensor:
        """All rows of a parameter; they hold values while they are gathered."""
        return _whole(self._memory, self.layout, index)

    def rows(self, index: int) -> Tensor:
        """The rows of this rank."""
        return _rows(self._rows, self.layout, index, self._communicator.rank)

    def gather(self) -> Wait | None:
        """Starts to bring all rows together, in the thread of the shard group."""
        communicator = self._communicator
        done = communicator.thread.submit(
            lambda: communicator.gather_to_nodes(self._memory, self._rows, self.layout.piece_sizes)
        )
        return done.wait


class DeviceMemory:
    """Every rank has its rows, and memory for all rows.

    Args:
        layout: of the parameters.
        dtype: of the parameters.
        group: the shard group.
        device: where this rank computes.
    """

    gathers = True

    def __init__(
        self, layout: ShardLayout, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
    ):
        self.layout = layout
        self._group = group
        self._rank = dist.get_rank(group)
        self._memory = torch.empty(layout.whole_size, dtype=dtype, device=device)
        self._rows = torch.zeros(layout.shard_size, dtype=dtype, device=device)

    def whole(self, index: int) -> Tensor:
        """All rows of a parameter; they hold values while they are gathered."""
        return _whole(self._memory, self.layout, index)

    def rows(self, index: int) -> Tensor:
        """The rows of this rank."""
        return _rows(self._rows, self.layout, index, self._rank)

    def gather(self) -> Wait | None:
        """Starts to bring all rows together."""
        layout = self.layout
        works = []
        for start, size in zip(layout.starts, layout.piece_sizes, strict=True):
            first = start * layout.num_shards
            whole = self._memory[first : first + size * layout.num_shards]
            own = self._rows[start : start + size]
            works.append(all_gather_single(whole, own, group=self._group, async_op=True))

        def wait() -> None:
            for work in works:
                work.wait()

        return wait


def memory_for(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
) -> ShardMemory:
    """Takes memory for parameters; collective over their shard group.

    Args:
        shapes: of the parameters.
        dtype: of all of them.
        group: the shard group.
        device: where this rank computes.
    """
    layout = ShardLayout(tuple(shapes), dist.get_world_size(group))
    if not isinstance(group, ShardwrightProcessGroup):
        return DeviceMemory(layout, dtype, group, device)
    communicator = group.communicator
    kind = HostMemory if len(communicator.topology.nodes) == 1 else HostsMemory
    return kind(layout, dtype, communicator)


def _whole(memory: Tensor, layout: ShardLayout, index: int) -> Tensor:
    shape = layout.shapes[index]
    first = layout.whole_start(index)
    return memory[first : first + _numel(shape)].view(shape)


def _rows(memory: Tensor, layout: ShardLayout, index: int, rank: int) -> Tensor:
    shape = layout.piece_shape(index, rank)
    first = layout.starts[index]
    return memory[first : first + _numel(shape)].view(shape)


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()

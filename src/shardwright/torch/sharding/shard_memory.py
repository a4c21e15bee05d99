"""Stores the rows of sharded parameters, and gathers them.

::

    HostMemory      all ranks of the shard group on one host    all rows are there, for all of them
    HostsMemory     on several hosts                            each host gathers those of the others, once
    DeviceMemory    any other ranks (GPUs, gloo)                each rank gathers those of the others
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm._private import all_gather_single
from shardwright.comm.collectives.communicator import Communicator
from shardwright.comm.collectives.shardwright_process_group import ShardwrightProcessGroup
from shardwright.errors import TraceMismatchError
from shardwright.placement import ShardLayout

Wait = Callable[[], None]
"""Waits until all rows are there."""

# Behind the rows of a rank goes the number of its parcel, where ranks gather when they need to.
_NUMBER_BYTES = 8


class ShardMemory:
    """Memory for some parameters of one type; each rank has its rows, and for a while all rows.

    Attributes:
        gathers: rows have to be brought together.
    """

    gathers = True

    def __init__(self, layout: ShardLayout, rank: int, rows: Tensor):
        self.layout = layout
        self._rank = rank
        self._rows = rows
        self._memory: Tensor | None = None

    def whole(self, index: int) -> Tensor:
        """All rows of a parameter; they hold values while they are gathered."""
        shape, first = self.layout.shapes[index], self.layout.whole_start(index)
        return self.gathered()[first : first + prod(shape)].view(shape)

    def rows(self, index: int) -> Tensor:
        """The rows of this rank."""
        shape, first = self.layout.piece_shape(index, self._rank), self.layout.starts[index]
        return self._rows[first : first + prod(shape)].view(shape)

    def gather(self) -> Wait:
        """Starts to bring all rows together."""
        raise NotImplementedError

    def gathered(self) -> Tensor:
        """The memory with all rows, and numbers behind them."""
        assert self._memory is not None
        return self._memory

    def release(self) -> None:
        """Releases memory for all rows; whatever looks at it keeps it."""
        self._memory = None

    def _compare_numbers(self, memory: Tensor) -> None:
        """Refuses rows of other parameters, which other ranks may have sent."""
        found, own = memory[self.layout.whole_size :], self._rows[self.layout.shard_size :]
        theirs, ours = found.view(torch.uint8).view(-1, own.nbytes), own.view(torch.uint8)
        if not torch.equal(theirs, ours.expand_as(theirs)):
            ranks = (theirs != ours).any(1).nonzero().flatten().tolist()
            raise TraceMismatchError(
                f"the ranks {ranks} of the group that shares parameters use them in another order than this "
                "one. Where sdp_max_live_parameters has them gather parameters as they are used, all "
                "replicas must use the same ones in the same order: raise it, so that all are gathered at "
                "once."
            )


class _HostMemory(ShardMemory):
    """Memory that the ranks of a host share; each writes to its own rows."""

    gathers = False

    def __init__(self, layout: ShardLayout, dtype: torch.dtype, communicator: Communicator):
        # Parts of layers may be empty on this rank, and there is no memory of 0 bytes to share.
        num_bytes = max(layout.whole_size, 1) * dtype.itemsize
        memory = communicator.share_memory(num_bytes).view(dtype)
        super().__init__(layout, communicator.rank, memory)
        self._memory = memory

    def rows(self, index: int) -> Tensor:
        """The rows of this rank, a part of all."""
        rows = self.layout.rows(index, self._rank)
        return self.whole(index)[rows.start : rows.stop]

    def gather(self) -> Wait:
        """They are there, as soon as all ranks have met."""
        return lambda: None

    def release(self) -> None:
        """They stay: this memory has the rows of this rank."""


class _HostsMemory(ShardMemory):
    """All rows are gathered into memory that the ranks of a host share."""

    def __init__(self, layout: ShardLayout, dtype: torch.dtype, communicator: Communicator, number: int):
        super().__init__(layout, communicator.rank, _numbered_rows(layout, dtype, number))
        self._communicator = communicator
        self._pieces = (*layout.piece_sizes, self._rows.numel() - layout.shard_size)

    def gather(self) -> Wait:
        """Starts to bring all rows together, in the thread of the shard group."""
        communicator, present = self._communicator, self._memory
        num_bytes = self._rows.nbytes * self.layout.num_shards

        def task() -> Tensor:
            memory = present
            if memory is None:
                with torch.inference_mode(False):  # others shall be able to train with it
                    memory = communicator.share_memory(num_bytes).view(self._rows.dtype)
            communicator.gather_to_nodes(memory, self._rows, self._pieces)
            return memory

        done = communicator.thread.submit(task)

        def wait() -> None:
            memory: Tensor = done.wait()
            self._memory = memory
            self._compare_numbers(memory)

        return wait


class _DeviceMemory(ShardMemory):
    """Every rank has memory for all rows."""

    def __init__(
        self,
        layout: ShardLayout,
        dtype: torch.dtype,
        group: dist.ProcessGroup,
        device: torch.device,
        number: int,
    ):
        super().__init__(layout, dist.get_rank(group), _numbered_rows(layout, dtype, number).to(device))
        self._group = group

    def gather(self) -> Wait:
        """Starts to bring all rows together."""
        layout, own = self.layout, self._rows
        if self._memory is None:
            with torch.inference_mode(False):  # others shall be able to train with it
                self._memory = own.new_empty(own.numel() * layout.num_shards)
        memory = self._memory
        works = []
        for start, stop in pairwise((*layout.starts, layout.shard_size, own.numel())):
            whole = memory[start * layout.num_shards : stop * layout.num_shards]
            works.append(all_gather_single(whole, own[start:stop], group=self._group, async_op=True))

        def wait() -> None:
            for work in works:
                work.wait()
            if memory.device.type == "cpu":
                self._compare_numbers(memory)

        return wait


def memory_for(
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    number: int,
) -> ShardMemory:
    """Takes memory for parameters; collective over their shard group.

    Args:
        shapes: of the parameters.
        dtype: of all of them.
        group: the shard group.
        device: where this rank computes.
        number: counts the calls: ranks compare it when they gather.
    """
    layout = ShardLayout(tuple(shapes), dist.get_world_size(group))
    if not isinstance(group, ShardwrightProcessGroup):
        return _DeviceMemory(layout, dtype, group, device, number)
    communicator = group.communicator
    if len(communicator.topology.nodes) == 1:
        return _HostMemory(layout, dtype, communicator)
    return _HostsMemory(layout, dtype, communicator, number)


def _numbered_rows(layout: ShardLayout, dtype: torch.dtype, number: int) -> Tensor:
    """Room for the rows of a rank, and behind them the number of what they belong to."""
    rows = torch.zeros(layout.shard_size + -(-_NUMBER_BYTES // dtype.itemsize), dtype=dtype)
    packed = torch.frombuffer(bytearray(number.to_bytes(_NUMBER_BYTES, "little")), dtype=torch.uint8)
    rows[layout.shard_size :].view(torch.uint8)[:_NUMBER_BYTES] = packed
    return rows

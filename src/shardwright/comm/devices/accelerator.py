"""The communication of tensors that are not on the CPU."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]

from shardwright.comm._private import has_nccl, nccl_group
from shardwright.comm.collectives.ordered_thread import OrderedThread
from shardwright.comm.devices.device_lanes import DeviceLanes, StreamLanes

__all__ = ["CUDA", "Accelerator", "MakeGroup"]


class MakeGroup(Protocol):
    """Makes a process group of some ranks; each of them calls it."""

    def __call__(self, store: Store, rank: int, num_ranks: int, *, timeout_s: float) -> dist.ProcessGroup: ...


@dataclass(frozen=True, slots=True)
class Accelerator:
    """A type of device, and how its tensors get to other ranks.

    Attributes:
        device_type: as `torch.device.type` has it.
        is_present: whether this process could use it.
        make_group: makes the groups that take its tensors.
        make_lanes: makes what runs hops, for the ordered thread of a group.
    """

    device_type: str
    is_present: Callable[[], bool]
    make_group: MakeGroup
    make_lanes: Callable[[OrderedThread], DeviceLanes]


CUDA = Accelerator("cuda", has_nccl, nccl_group, lambda thread: StreamLanes())

"""Gloo and a thread stand in for NCCL and streams: the classes for accelerators run on the CPU."""

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from shardwright.collectives import Topology
from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.prices import DevicePrices, Line
from shardwright.comm._private import gloo_group
from shardwright.comm.collectives import connect
from shardwright.comm.collectives.device_collectives import DeviceCollectives
from shardwright.comm.collectives.device_lanes import Accelerator, Hops
from shardwright.comm.collectives.ordered_thread import CollectiveWork, OrderedThread
from shardwright.comm.collectives.shardwright_process_group import ShardwrightProcessGroup
from shardwright.comm.joining.process_group import default_store


class ThreadLanes:
    """Hops one after the other, on the ordered thread of a group, where gloo replaces NCCL."""

    def __init__(self, thread: OrderedThread):
        self._thread = thread

    def run(self, hops: Hops, results: list[Tensor], *, reads: list[Tensor], waits: bool) -> dist.Work:
        def task() -> list[Tensor]:
            for hop, chunk in hops.in_order():
                hop.do(chunk)
            return results

        if waits:
            done: Future[list[Tensor]] = Future()
            done.set_result(self._thread.run(task))
            return CollectiveWork(done)
        return CollectiveWork(self._thread.submit(task))

    def join(self) -> None:
        self._thread.run(lambda: None)

    def shared(self, tensor: Tensor) -> Tensor:
        return tensor


STAND_IN = Accelerator("cpu", lambda: True, gloo_group, ThreadLanes)


def device_prices(*, everyone_s=1.0, start_s=0.0):
    """Prices by which hops are taken, in chunks as small as there are, wherever they are possible."""
    everyone, hop = Line(everyone_s, 1e6), Line(start_s, 1e9)
    lines = dict.fromkeys(COLLECTIVES, hop)
    return DevicePrices(
        everyone=dict.fromkeys(COLLECTIVES, everyone), across=lines, inside=lines, reorder=hop, source="test"
    )


def device_collectives(hosts, name="devices", prices=None):
    """The collectives of one rank; hosts has a letter for each."""
    return DeviceCollectives(
        dist.PrefixStore(f"test of {name} {hosts}", default_store()),
        rank=dist.get_rank(),
        topology=Topology.from_hosts(hosts),
        prices=prices or device_prices(),
        accelerator=STAND_IN,
        thread=OrderedThread(name),
        timeout_s=30.0,
    )


def group_standing_in(hosts, prices=None):
    """A process group of the backend whose tensors on the CPU go where those of CUDA devices would."""
    if not hasattr(dist.Backend, "STANDING_IN"):
        dist.Backend.register_backend("standing_in", _make, devices=["cpu"])
    return group_on_hosts(hosts, "standing_in", prices)


def group_on_hosts(hosts, backend="shardwright", prices=None):
    """A process group of Shardwright's; hosts has a letter for each rank."""
    connect.this_host = lambda: hosts[dist.get_rank()]
    group = dist.new_group(backend=backend)
    group.devices.prices = prices or device_prices()
    return group


def _make(store, rank, num_ranks, timeout):
    return ShardwrightProcessGroup(store, rank, num_ranks, timeout, accelerator=STAND_IN)

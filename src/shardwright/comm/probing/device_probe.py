"""Measures the cost of accelerator collectives on the ranks of a group.

As in `collective_probe`, all ranks run the same step at the same time, the slowest rank counts, and so does
the fastest of several attempts.
"""

import datetime
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.collectives.choose import COLLECTIVES
from shardwright.collectives.choose_on_devices import why_not_hierarchical
from shardwright.collectives.prices import DevicePrices, Line
from shardwright.comm.devices.device_collectives import DeviceCollectives
from shardwright.comm.joining import group_collectives
from shardwright.comm.probing.collective_probe import line_through

__all__ = ["measure_device_prices"]

_ROUNDS = 5
_SMALL_BYTES, _LARGE_BYTES = 4 * 1024, 256 * 2**20
_ITEMSIZE = 4
# A call that takes longer is halved until it does not.
_LONGEST_S = 0.1
_CALLS = 10
_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


def measure_device_prices(
    group: DeviceCollectives, device: torch.device, *, largest: int = _LARGE_BYTES
) -> DevicePrices:
    """Prices of a group on accelerators; collective over its ranks, which all get the same."""
    watch = _Stopwatch(group, device, largest)
    hops = any(not why_not_hierarchical(collective, group.topology) for collective in COLLECTIVES)
    when = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return DevicePrices(
        everyone=watch.lines(group.everyone),
        across=watch.lines(group.across) if hops else {},
        inside=watch.lines(group.inside) if hops else {},
        reorder=watch.line(watch.reordering),
        source=f"measured on {device.type} devices of {group.topology}, {when}",
    )


class _Stopwatch:
    """Times what all ranks do."""

    def __init__(self, group: DeviceCollectives, device: torch.device, largest: int):
        self._group = group
        self._largest = largest
        self._device = device

    def lines(self, group: dist.ProcessGroup) -> dict[str, Line]:
        """A line for each collective of a group."""
        return {collective: self.line(partial(self._call, group, collective)) for collective in COLLECTIVES}

    def line(self, call_of: Callable[[int], tuple[Callable[[], object], int]]) -> Line:
        """Through the times of a small and a large call."""
        call, small = call_of(_SMALL_BYTES)
        small_s = self._seconds(call)
        size = self._largest
        call, large = call_of(size)
        while size > 4 * _SMALL_BYTES and self._slowest(call, 1) > _LONGEST_S:
            size //= 2
            call, large = call_of(size)
        return line_through([small_s, self._seconds(call)], [small, large])

    def reordering(self, num_bytes: int) -> tuple[Callable[[], object], int]:
        """A copy as an all-gather makes it."""
        data = self._zeros(num_bytes // _ITEMSIZE).view(8, 4, -1)
        target = torch.empty_like(data).view(4, 8, -1)
        return lambda: target.copy_(data.transpose(0, 1)), num_bytes

    def _call(
        self, group: dist.ProcessGroup, collective: str, num_bytes: int
    ) -> tuple[Callable[[], object], int]:
        count = max(1, num_bytes // _ITEMSIZE // group.size())
        part, whole = self._zeros(count), self._zeros(count * group.size())
        calls: dict[str, Callable[[], object]] = {
            "all_gather": partial(group_collectives.all_gather, group, whole, part),
            "reduce_scatter": partial(group_collectives.reduce_scatter, group, part, whole, _SUM),
            "all_reduce": partial(group_collectives.all_reduce, group, whole, _SUM),
            "broadcast": partial(group_collectives.broadcast, group, whole, 0),
        }
        return calls[collective], _ITEMSIZE * whole.numel()

    def _zeros(self, count: int) -> Tensor:
        return torch.zeros(count, device=self._device)

    def _seconds(self, call: Callable[[], object]) -> float:
        self._slowest(call, 2)  # the first one connects
        return min(self._slowest(call, _CALLS) for _ in range(_ROUNDS))

    def _slowest(self, call: Callable[[], object], number: int) -> float:
        group_collectives.all_reduce(self._group.everyone, self._zeros(1), _SUM)
        self._settle()
        start = time.perf_counter()
        for _ in range(number):
            call()
        self._settle()
        seconds = self._zeros(1) + (time.perf_counter() - start) / number
        group_collectives.all_reduce(self._group.everyone, seconds, _MAX)
        return seconds.item()

    def _settle(self) -> None:
        """Waits for the device."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

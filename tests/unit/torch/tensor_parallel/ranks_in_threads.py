"""Ranks of a tensor-parallel group as threads of this process: thousands of cases in seconds."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from shardwright.torch.tensor_parallel.divide import tensor_group

_TIMEOUT_S = 20


class _Meeting:
    """Where the threads exchange what they have."""

    def __init__(self, num_ranks):
        self.barrier = threading.Barrier(num_ranks)
        self.given = [None] * num_ranks

    def exchange(self, rank, value):
        self.given[rank] = value
        self.barrier.wait(_TIMEOUT_S)
        found = list(self.given)
        self.barrier.wait(_TIMEOUT_S)
        return found


class ThreadCollectives:
    """Collectives of one thread."""

    def __init__(self, rank, num_ranks, meeting):
        self.rank, self.num_ranks, self._meeting = rank, num_ranks, meeting

    def all_reduce(self, data, operation):
        parts = self._meeting.exchange(self.rank, ("all_reduce", tuple(data.shape), data.clone()))
        assert len({part[:2] for part in parts}) == 1, parts
        stacked = [part[2] for part in parts]
        total = stacked[0]
        for part in stacked[1:]:
            if operation == "sum":
                total = total + part
            else:
                total = torch.maximum(total, part) if operation == "max" else torch.minimum(total, part)
        data.copy_(total)

    def all_gather(self, output, data):
        parts = self._meeting.exchange(self.rank, ("all_gather", data.clone()))
        assert {part[0] for part in parts} == {"all_gather"}
        assert len({part[1].shape for part in parts}) == 1
        output.copy_(torch.cat([part[1] for part in parts]))

    def all_to_all(self, output, data, receives, sends):
        parts = self._meeting.exchange(self.rank, ("all_to_all", data.clone(), list(sends)))
        assert {part[0] for part in parts} == {"all_to_all"}
        pieces = [part[1].split(part[2])[self.rank] for part in parts]
        assert [len(piece) for piece in pieces] == list(receives)
        output.copy_(torch.cat(pieces))


_POOLS: dict[int, ThreadPoolExecutor] = {}


def on_ranks(num_ranks: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls ``function(group, *args)`` on each rank of a new group; returns the results by rank."""
    meeting = _Meeting(num_ranks)
    return _on_threads(
        num_ranks,
        [meeting],
        lambda rank: function(tensor_group(ThreadCollectives(rank, num_ranks, meeting)), *args),
    )


def on_grid(num_outer: int, num_inner: int, function: Callable[..., Any]) -> list[Any]:
    """The same on a grid: each rank of the group has an inner group, of ranks that share its parts."""
    num_ranks = num_outer * num_inner
    everyone = _Meeting(num_ranks)
    rows = [_Meeting(num_inner) for _ in range(num_outer)]
    columns = [_Meeting(num_outer) for _ in range(num_inner)]

    def run(rank):
        place, own = divmod(rank, num_inner)
        group = tensor_group(ThreadCollectives(place, num_outer, columns[own]))
        group.holds(tensor_group(ThreadCollectives(own, num_inner, rows[place])))
        experts = tensor_group(ThreadCollectives(rank, num_ranks, everyone))
        group.share_experts(experts, range(own, num_ranks, num_inner))
        return function(group)

    return _on_threads(num_ranks, [everyone, *rows, *columns], run)


def _on_threads(num_ranks: int, meetings: list[_Meeting], call: Callable[[int], Any]) -> list[Any]:
    if num_ranks not in _POOLS:
        _POOLS[num_ranks] = ThreadPoolExecutor(num_ranks)

    def run(rank):
        try:
            return call(rank)
        except BaseException:
            for meeting in meetings:
                meeting.barrier.abort()
            raise

    futures = [_POOLS[num_ranks].submit(run, rank) for rank in range(num_ranks)]
    failures = [future.exception() for future in futures]
    real = [
        each for each in failures if each is not None and not isinstance(each, threading.BrokenBarrierError)
    ]
    for failure in real or [each for each in failures if each is not None]:
        raise failure
    return [future.result() for future in futures]

"""Connects a group for collectives: finds which ranks share a host, and sets them up."""

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwright.collectives import Topology
from shardwright.collectives.choose import ROOM_BYTES
from shardwright.collectives.prices import DEFAULT_PRICES, PRICES_VARIABLE, Prices, read_prices
from shardwright.comm._private import gloo_group
from shardwright.comm.codec import DecodeError, declare, decode, encode
from shardwright.comm.collectives.communicator import Communicator
from shardwright.comm.collectives.step_runner import Neighbours
from shardwright.comm.joining.process_group import present_session, refuse_mixed_versions
from shardwright.comm.joining.session import begin_session
from shardwright.comm.launchers import detect
from shardwright.comm.local_peers import connect_on_this_host, this_host
from shardwright.errors import ConfigError, LaunchError

log = logging.getLogger(__name__)

declare(Prices)

_UNREADABLE = (
    "what rank {rank} of the group tells in the store cannot be read: {problem}. It runs another version of "
    "Shardwright, or a stranger who reaches the store has written in its place."
)


def tell_all_through(store: Store, rank: int, num_ranks: int) -> Callable[[Any], list[Any]]:
    """A function that sends a fact (as `codec` takes it) to all ranks, and returns each rank's, by rank.

    Rank 0 reads them all, and the others read what it has written: two questions to the store a rank.
    """
    calls = 0

    def tell_all(fact: Any) -> list[Any]:
        nonlocal calls
        keys = [f"{calls}/{other}" for other in range(num_ranks)]
        calls += 1
        own = encode(fact)
        if rank > 0:
            store.set(keys[rank], own)  # type: ignore[arg-type]
            told = _list_of(store.get(keys[0]), num_ranks)
        else:
            told = [own, *(store.get(key) for key in keys[1:])]
            if num_ranks > 1:
                store.set(keys[0], encode(told))  # type: ignore[arg-type]
        return [_fact(data, other) for other, data in enumerate(told)]

    return tell_all


def _list_of(data: bytes, num_ranks: int) -> list[bytes]:
    told = _fact(data, 0)
    if isinstance(told, list) and len(told) == num_ranks and all(isinstance(each, bytes) for each in told):
        return told
    raise LaunchError(_UNREADABLE.format(rank=0, problem="it is no list of what all ranks tell"))


def _fact(data: bytes, rank: int) -> Any:
    try:
        return decode(data)
    except DecodeError as error:
        raise LaunchError(_UNREADABLE.format(rank=rank, problem=error)) from error


def connect(
    store: Store,
    *,
    rank: int,
    num_ranks: int,
    timeout_s: float,
    prices: Prices | None = None,
    host: str | None = None,
    name: str = "group",
    world_rank: int | None = None,
) -> Communicator:
    """Connects the ranks of a group; collective over all of them."""
    session = present_session() or begin_session(
        PrefixStore("shardwright/session", store),
        rank=rank,
        num_ranks=num_ranks,
        one_host=detect(os.environ).num_nodes == 1,
        timeout_s=timeout_s,
    )
    store = session.store(store)
    tell_all = tell_all_through(PrefixStore("shardwright/connect", store), rank, num_ranks)
    refuse_mixed_versions(tell_all)
    host = host or this_host()
    sockets = connect_on_this_host(rank, tell_all, what="collectives", timeout_s=timeout_s, host=host)
    # Where the ranks of a host cannot share memory, each is a node of its own.
    hosts = tell_all(host if sockets is not None else f"{host} rank {rank}")
    topology = Topology.from_hosts(hosts)
    world_ranks = tell_all(rank if world_rank is None else world_rank)
    neighbours = None
    if sockets:
        neighbours = Neighbours(
            sockets, rank=rank, world_ranks=world_ranks, num_bytes=2 * ROOM_BYTES, timeout_s=timeout_s
        )
    messages = None
    if len(topology.nodes) > 1:
        own_store = PrefixStore("shardwright/messages", store)
        messages = gloo_group(own_store, rank, num_ranks, timeout_s=timeout_s)
    gloo = gloo_group(PrefixStore("shardwright/gloo", store), rank, num_ranks, timeout_s=timeout_s)
    # Nobody goes on, and perhaps ends, while others still connect.
    agreed = _agreed(prices, topology, rank, tell_all)
    return Communicator(
        rank=rank,
        world_ranks=world_ranks,
        topology=topology,
        prices=agreed,
        neighbours=neighbours,
        messages=messages,
        gloo=gloo,
        name=name,
        session=session,
    )


def _agreed(
    prices: Prices | None, topology: Topology, rank: int, tell_all: Callable[[Any], list[Any]]
) -> Prices:
    """The prices of rank 0, which must not read them in vain while the others wait."""
    problem: ConfigError | None = None
    if rank == 0 and prices is None:
        path = os.environ.get(PRICES_VARIABLE)
        try:
            prices = _read(path, topology) if path else DEFAULT_PRICES
        except ConfigError as error:
            problem = error
    found, failed = tell_all((prices, problem))[0]
    if failed is not None:
        raise failed
    agreed: Prices = found
    return agreed


def _read(path: str, topology: Topology) -> Prices:
    """Prices from a file; what gloo and NCCL take is known for the ranks that it was measured on alone."""
    prices, measured = read_prices(path)
    if measured == topology or not (prices.gloo or prices.devices):
        return prices
    log.warning(
        "the prices %s are of %s: on %s gloo's own collectives are not considered, and accelerators have "
        "default prices",
        path,
        measured,
        topology,
    )
    return replace(prices, gloo={}, devices=None)

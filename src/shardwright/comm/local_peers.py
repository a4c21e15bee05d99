"""The other ranks of this host: how they are found, and how this process waits for them."""

import logging
import os
import secrets
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.local_link import LocalLink, LocalReceipt
from shardwright.comm.shared_memory import Ring, Segment
from shardwright.errors import PeerLostError

__all__ = ["LocalPeers", "connect_local_peers"]

log = logging.getLogger(__name__)


class LocalPeers:
    """Ways to the other ranks of this host.

    While this process waits for one of them, it takes what all of them send: nobody waits in a circle as long
    as receives are posted before those that wait.

    Args:
        links: by world rank.
        timeout_s: how long to wait for a peer at most.
    """

    def __init__(self, links: Mapping[int, LocalLink], *, timeout_s: float):
        self._links = dict(links)
        self._timeout_s = timeout_s
        self._poll = select.poll()
        self._by_fd = {link.fd: link for link in links.values()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        _CLOSED_IN_CHILDREN.add(self)

    def __contains__(self, rank: int) -> bool:
        return rank in self._links

    @property
    def num_bytes(self) -> int:
        """Shared memory for the messages that this rank sends."""
        return sum(link.num_bytes for link in self._links.values())

    def send(self, tensor: Tensor, target: int) -> None:
        """Copies a tensor for a rank; waits where several of its messages are unread.

        Raises:
            PeerLostError: the rank has ended, or does not read.
        """
        link = self._links[target]
        if not link.write(tensor):
            self._listen(0.0)
            self._until(lambda: link.write(tensor), link, "sending to")

    def post(self, tensor: Tensor, source: int) -> LocalReceipt:
        """Names the tensor into which the next message of a rank goes."""
        receipt = LocalReceipt(tensor)
        self._links[source].post(receipt)
        return receipt

    def wait(self, receipt: LocalReceipt, source: int) -> None:
        """Returns when the message is there.

        Raises:
            PeerLostError: the rank ended before it sent it, or takes too long.
        """
        self._until(lambda: receipt.arrived, self._links[source], "receiving from")

    def close(self) -> None:
        """Lets go of all of them."""
        for link in self._links.values():
            link.close()

    def _until(self, done: Callable[[], bool], link: LocalLink, doing: str) -> None:
        deadline_s = time.monotonic() + self._timeout_s
        while True:
            for each in self._links.values():
                each.deliver()
            if done():
                return
            if link.ended:
                raise PeerLostError(f"{doing} rank {link.peer} failed: it has ended", rank=link.peer)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise PeerLostError(
                    f"{doing} rank {link.peer} failed: no answer within {self._timeout_s:g} s (timeout_s)",
                    rank=link.peer,
                )
            self._listen(left_s)

    def _listen(self, timeout_s: float) -> None:
        """Takes note of what is said; waits for the first word."""
        for fd, _ in self._poll.poll(timeout_s * 1000):
            link = self._by_fd[fd]
            link.listen()
            if link.ended:
                self._poll.unregister(fd)


# Children of this process, such as the workers of a data loader, must not keep connections open: others would
# not notice that this process has ended.
_CLOSED_IN_CHILDREN: "weakref.WeakSet[LocalPeers]" = weakref.WeakSet()


def _close_in_child() -> None:
    for peers in _CLOSED_IN_CHILDREN:
        peers.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def connect_local_peers(*, timeout_s: float) -> LocalPeers | None:
    """Connects the ranks of each host; collective over all ranks of the default process group.

    Ranks are on one host if they share its kernel and its network namespace.

    Returns:
        None where this host has no other rank, or where its system lacks what is needed; the log says which.
    """
    rank, cookie = dist.get_rank(), secrets.token_hex(16)
    try:
        host, listener = _host(), _listen_at(cookie)
    except OSError as error:
        host, listener = f"no shared memory on {rank}: {error}", None
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (host, cookie))
    here = [other for other, (where, _) in enumerate(everyone) if where == host]
    links: dict[int, LocalLink] = {}
    problem = "" if listener is not None else host
    if listener is not None:
        with listener:
            try:
                _try_memory()
                cookies = [text for _, text in everyone]
                links = _connect(rank, here, cookies, listener, timeout_s=timeout_s)
            except OSError as error:
                problem = f"{type(error).__name__}: {error}"
    problems: list[Any] = [None] * len(everyone)
    dist.all_gather_object(problems, problem)
    failed = [(other, problems[other]) for other in here if problems[other]]
    if failed or not links:
        for link in links.values():
            link.close()
        if failed and rank == here[0]:
            log.warning("messages on this host go through sockets, because of rank %d: %s", *failed[0])
        return None
    return LocalPeers(links, timeout_s=timeout_s)


def _host() -> str:
    """What all ranks of a host have in common, and no others."""
    if not (sys.platform == "linux" and hasattr(os, "memfd_create")):
        raise OSError(f"{sys.platform} has no anonymous files in memory")
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"


def _address(cookie: str) -> bytes:
    return b"\0shardwright-" + cookie[:16].encode()  # abstract: it is in no file system


def _listen_at(cookie: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(_address(cookie))
    listener.listen(1024)
    return listener


def _try_memory() -> None:
    """Raises OSError where shared memory cannot be made."""
    ring = Ring(1)
    Segment(ring.grow(1), ring.num_bytes)


def _connect(
    rank: int, here: Sequence[int], cookies: Sequence[str], listener: socket.socket, *, timeout_s: float
) -> dict[int, LocalLink]:
    """One connection for every pair: the higher rank calls, and says who it is and whom it wants."""
    links: dict[int, LocalLink] = {}
    for other in here:
        if other < rank:
            caller = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            caller.connect(_address(cookies[other]))
            caller.send(f"{cookies[rank]} {cookies[other]}".encode())
            links[other] = LocalLink(caller, other)
    expected = {f"{cookies[other]} {cookies[rank]}": other for other in here if other > rank}
    listener.settimeout(timeout_s)
    while expected:
        called, _ = listener.accept()
        called.settimeout(timeout_s)
        other = expected.pop(called.recv(256).decode(errors="replace"), -1)
        if other < 0:
            called.close()  # not one of us
            continue
        called.settimeout(None)
        links[other] = LocalLink(called, other)
    return links

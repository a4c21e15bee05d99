"""The other ranks of this host: how they are found, and how this process waits for them."""

import contextlib
import logging
import os
import secrets
import select
import socket
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.local_link import LocalLink, LocalReceipt
from shardwright.comm.purpose import Purpose
from shardwright.comm.shared_memory import Ring, Segment
from shardwright.errors import PeerLostError, PeerTimeoutError

__all__ = ["LocalPeers", "connect_local_peers"]

log = logging.getLogger(__name__)

_LONGEST_POLL_S = 3600.0  # the kernel takes no more than some weeks


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

    def send(self, tensor: Tensor, target: int, purpose: Purpose = Purpose.PIPELINE) -> None:
        """Copies a tensor for a rank; waits where several of its messages are unread.

        Raises:
            PeerLostError: the rank has ended, or does not read.
            OSError: the system has no memory for the message.
        """
        link = self._links[target]
        if not link.write(tensor, purpose):
            self._until(lambda: not link.is_full, link, "sending to")
            link.write(tensor, purpose)

    def post(self, tensor: Tensor, source: int, purpose: Purpose = Purpose.PIPELINE) -> LocalReceipt:
        """Names the tensor into which the next message of a rank goes."""
        receipt = LocalReceipt(tensor, purpose)
        self._links[source].post(receipt)
        return receipt

    def wait(self, receipt: LocalReceipt, source: int) -> None:
        """Returns when the message is there.

        Raises:
            PeerLostError: the rank ended before it sent it, or takes too long.
        """
        self._until(lambda: receipt.arrived, self._links[source], "receiving from")

    def shrink(self) -> None:
        """Lets go of the memory for messages to come: after some that were larger than usual."""
        for link in self._links.values():
            link.shrink()

    def close(self) -> None:
        """Lets go of all of them, and of the memory."""
        for link in self._links.values():
            link.close()

    def _until(self, done: Callable[[], bool], link: LocalLink, doing: str) -> None:
        """Waits; `done` must not listen: what is heard has to be delivered before this process sleeps."""
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
                raise PeerTimeoutError(
                    f"{doing} rank {link.peer} failed: no answer within {self._timeout_s:g} s. It hangs, or "
                    "is at another place of the script; its log may tell. If it may take longer, raise the "
                    "setting timeout_s.",
                    rank=link.peer,
                )
            self._listen(left_s)

    def _listen(self, timeout_s: float) -> None:
        """Takes note of what is said; waits for the first word."""
        for fd, _ in self._poll.poll(min(timeout_s, _LONGEST_POLL_S) * 1000):
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

    Ranks are on one host if they share its kernel and its network namespace. ::

        tell all: host, cookie  ──▶  call the lower ranks  ──▶  tell all: done  ──▶  take the calls

    Nobody waits for a rank that cannot: each step is taken only if all ranks of the host took the one before.

    Returns:
        None where this host has no other rank, or where one of them lacks what is needed; the log says what.

    Raises:
        OSError: a connection that was made could not be taken.
    """
    rank, cookie = dist.get_rank(), secrets.token_hex(16)
    listener, problem = _attempt(lambda: _listen_at(cookie))
    everyone = _tell_all((_host(), cookie, problem))
    cookies = [text for _, text, _ in everyone]
    problems = [text for _, _, text in everyone]
    here = [other for other, (host, _, _) in enumerate(everyone) if host == everyone[rank][0]]
    callers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as unless_it_works:
        if listener is not None:
            unless_it_works.callback(listener.close)
        if not any(problems[other] for other in here):
            for other in [other for other in here if other < rank]:
                caller, problem = _attempt(partial(_call, cookies[rank], cookies[other], timeout_s=timeout_s))
                if caller is None:
                    break
                callers[other] = caller
                unless_it_works.callback(caller.close)
        problems = [first or second for first, second in zip(problems, _tell_all(problem), strict=True)]
        failed = [other for other in here if problems[other]]
        if failed and rank == here[0]:
            log.warning(
                "messages on this host go through sockets, because of rank %d: %s",
                failed[0],
                problems[failed[0]],
            )
        if failed or len(here) == 1:
            return None
        assert listener is not None
        expected = {f"{cookies[other]} {cookies[rank]}": other for other in here if other > rank}
        called = _take_calls(listener, expected, timeout_s=timeout_s)
        unless_it_works.pop_all()
    listener.close()
    return LocalPeers(
        {other: LocalLink(connection, other) for other, connection in (callers | called).items()},
        timeout_s=timeout_s,
    )


def _attempt(do: Callable[[], socket.socket]) -> tuple[socket.socket | None, str]:
    """A socket, or what went wrong."""
    try:
        return do(), ""
    except OSError as error:
        return None, f"{type(error).__name__}: {error}"


def _tell_all(fact: Any) -> list[Any]:
    """What each rank tells, by rank."""
    facts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(facts, fact)
    return facts


def _host() -> str:
    """What all ranks of a host have in common, and no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _address(cookie: str) -> bytes:
    return b"\0shardwright-" + cookie[:16].encode()  # abstract: it is in no file system


def _listen_at(cookie: str) -> socket.socket:
    """Raises OSError where this host lacks what is needed."""
    if not (sys.platform == "linux" and hasattr(os, "memfd_create")):
        raise OSError(f"{sys.platform} has no anonymous files in memory")
    ring = Ring(1)
    Segment(ring.grow(1), ring.num_bytes)
    with _closed_if_it_fails() as listener:
        listener.bind(_address(cookie))
        listener.listen(1024)
        return listener


def _call(own: str, other: str, *, timeout_s: float) -> socket.socket:
    """Connects to another rank, and says who it is and whom it wants."""
    with _closed_if_it_fails() as caller:
        caller.settimeout(timeout_s)
        caller.connect(_address(other))
        caller.send(f"{own} {other}".encode())
        caller.settimeout(None)
        return caller


@contextlib.contextmanager
def _closed_if_it_fails() -> Iterator[socket.socket]:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        yield made
    except BaseException:
        made.close()
        raise


def _take_calls(
    listener: socket.socket, expected: Mapping[str, int], *, timeout_s: float
) -> dict[int, socket.socket]:
    """The connections that others have made, by rank; `expected` has what each of them says first."""
    taken: dict[int, socket.socket] = {}
    listener.settimeout(timeout_s)
    with contextlib.ExitStack() as unless_it_works:
        while len(taken) < len(expected):
            called, _ = listener.accept()
            unless_it_works.callback(called.close)
            called.settimeout(timeout_s)
            other = expected.get(called.recv(256).decode(errors="replace"))
            if other is None or other in taken:
                called.close()  # not one of us
                continue
            called.settimeout(None)
            taken[other] = called
        unless_it_works.pop_all()
    return taken

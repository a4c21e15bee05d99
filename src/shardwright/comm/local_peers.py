"""The other ranks of this host: their sockets, and how this process waits for them.

Otherwise the children, such as a data loader's workers, would hide from other ranks that this process has
ended.
"""

import contextlib
import logging
import math
import os
import secrets
import select
import selectors
import socket
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import torch.distributed as dist
from torch import Tensor

from shardwright.comm.joining.process_group import tell_all
from shardwright.comm.joining.session import PrivateListener, call
from shardwright.comm.local_link import LocalLink, LocalReceipt, Ring, Segment
from shardwright.comm.message_names import Purpose
from shardwright.errors import PeerLostError, PeerTimeoutError


class _Closable(Protocol):
    def close(self) -> None: ...


_OPEN: "weakref.WeakSet[_Closable]" = weakref.WeakSet()


def close_in_children(connection: _Closable) -> None:
    """Has every process that is forked from this one close a connection."""
    _OPEN.add(connection)


def _close() -> None:
    for connection in _OPEN:
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close)


log = logging.getLogger(__name__)

_T = TypeVar("_T")

TellAll = Callable[[Any], Sequence[Any]]
"""Tells all ranks a fact that `codec` takes, and returns what each rank tells, by rank."""


def connect_on_this_host(
    rank: int, tell_all: TellAll, *, what: str, timeout_s: float, host: str | None = None
) -> dict[int, socket.socket] | None:
    """Connects the ranks of each host; collective over all ranks that `tell_all` reaches.

    Ranks are on one host if they share its kernel and its network namespace. ::

        tell all: host, cookie  ──▶  call the lower ranks  ──▶  tell all: done  ──▶  take the calls

    Nobody waits for a rank that cannot: each step is taken only if all ranks of the host took the one before.
    """
    cookie = secrets.token_hex(16)
    listener, problem = _attempt(_listen)
    path = "" if listener is None else listener.path
    everyone = tell_all((host or this_host(), path, cookie, problem))
    paths = [text for _, text, _, _ in everyone]
    cookies = [text for _, _, text, _ in everyone]
    problems = [text for _, _, _, text in everyone]
    here = [other for other, (host, *_) in enumerate(everyone) if host == everyone[rank][0]]
    callers: dict[int, socket.socket] = {}
    with contextlib.ExitStack() as unless_it_works:
        if listener is not None:
            unless_it_works.callback(listener.close)
        if not any(problems[other] for other in here):
            for other in [other for other in here if other < rank]:
                greeting = f"{cookies[rank]} {cookies[other]}"
                caller, problem = _attempt(partial(_call, paths[other], greeting, timeout_s=timeout_s))
                if caller is None:
                    break
                callers[other] = caller
                unless_it_works.callback(caller.close)
        problems = [first or second for first, second in zip(problems, tell_all(problem), strict=True)]
        failed = [other for other in here if problems[other]]
        if failed and rank == here[0]:
            log.warning(
                "%s on this host go through sockets, because of rank %d: %s",
                what,
                failed[0],
                problems[failed[0]],
            )
        if failed:
            return None
        assert listener is not None
        expected = {f"{cookies[other]} {cookies[rank]}": other for other in here if other > rank}
        called = _take_calls(listener, expected, timeout_s=timeout_s)
        unless_it_works.pop_all()
    listener.close()
    return callers | called


def _attempt(do: Callable[[], _T]) -> tuple[_T | None, str]:
    """A socket, or what went wrong."""
    try:
        return do(), ""
    except OSError as error:
        return None, f"{type(error).__name__}: {error}"


def this_host() -> str:
    """An identity that all ranks of a host have in common, and no others."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()


def _listen() -> PrivateListener:
    """Raises OSError where this host lacks what is needed."""
    if not (sys.platform == "linux" and hasattr(os, "memfd_create")):
        raise OSError(f"{sys.platform} has no anonymous files in memory")
    ring = Ring(1)
    Segment(ring.grow(1), ring.num_bytes)
    return PrivateListener(socket.SOCK_SEQPACKET)


def _call(path: str, greeting: str, *, timeout_s: float) -> socket.socket:
    """Connects to another rank, and says who it is and whom it wants."""
    caller = call(path, socket.SOCK_SEQPACKET, timeout_s=timeout_s)
    try:
        caller.send(greeting.encode())
        caller.settimeout(None)
    except BaseException:
        caller.close()
        raise
    return caller


def _take_calls(
    listener: PrivateListener, expected: Mapping[str, int], *, timeout_s: float
) -> dict[int, socket.socket]:
    """The connections that others have made, by rank; `expected` has what each of them says first.

    Whoever connects and says nothing, or something else, keeps nobody waiting.
    """
    taken: dict[int, socket.socket] = {}
    deadline_s = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as waiting, contextlib.ExitStack() as unless_it_works:
        waiting.register(listener.socket, selectors.EVENT_READ)
        while len(taken) < len(expected):
            ready = waiting.select(max(deadline_s - time.monotonic(), 0.0))
            if not ready:
                raise TimeoutError(f"{len(expected) - len(taken)} ranks have not called in {timeout_s:g} s")
            for key, _ in ready:
                if key.fileobj is listener.socket:
                    if (caller := listener.accept()) is not None:
                        unless_it_works.callback(caller.close)
                        waiting.register(caller, selectors.EVENT_READ)
                    continue
                caller = cast(socket.socket, key.fileobj)
                waiting.unregister(caller)
                said = b""
                with contextlib.suppress(ConnectionError):
                    said = caller.recv(256)
                other = expected.get(said.decode(errors="replace"))
                if other is None or other in taken:
                    caller.close()  # not one of us
                else:
                    taken[other] = caller
        kept = set(taken.values())
        unless_it_works.pop_all()
        for key in list(waiting.get_map().values()):
            if key.fileobj is not listener.socket and key.fileobj not in kept:
                cast(socket.socket, key.fileobj).close()
    return taken


_LONGEST_POLL_S = 3600.0  # the kernel takes no more than some weeks
_PAUSE_S = 1.0  # between two questions whether a rank has stopped; the first wait is as long


class LocalPeers:
    """Ways to the other ranks of this host.

    While this process waits for one of them, it takes what all of them send: nobody waits in a circle as long
    as receives are posted before those that wait.
    """

    def __init__(
        self,
        links: Mapping[int, LocalLink],
        *,
        timeout_s: float,
        has_stopped: Callable[[int], bool] = lambda _: False,
    ):
        self._links = dict(links)
        self._timeout_s = timeout_s
        self._has_stopped = has_stopped
        self._poll = select.poll()
        self._by_fd = {link.fd: link for link in links.values()}
        for fd in self._by_fd:
            self._poll.register(fd, select.POLLIN)
        close_in_children(self)

    def __contains__(self, rank: int) -> bool:
        return rank in self._links

    @property
    def num_bytes(self) -> int:
        """Shared memory for the messages that this rank sends."""
        return sum(link.num_bytes for link in self._links.values())

    def send(self, tensor: Tensor, target: int, purpose: Purpose = Purpose.PIPELINE) -> None:
        """Copies a tensor for a rank; waits where several of its messages are unread."""
        link = self._links[target]
        if not link.write(tensor, purpose):
            self._until(lambda: not link.is_full, link, "sending to")
            link.write(tensor, purpose)

    def post(self, tensor: Tensor, source: int, purpose: Purpose = Purpose.PIPELINE) -> LocalReceipt:
        """Names the tensor into which the next message of a rank goes."""
        receipt = LocalReceipt(tensor, purpose)
        self._links[source].post(receipt)
        return receipt

    def wait(
        self, receipt: LocalReceipt, source: int, *, look: Callable[[], float] = lambda: math.inf
    ) -> None:
        """Returns when the message is there."""
        self._until(lambda: receipt.arrived, self._links[source], "receiving from", look)

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has closed its connection, as far as is known now."""
        self._listen(0.0)
        return self._links[rank].ended

    def shrink(self) -> None:
        """Releases the memory for future messages, after some that were larger than usual."""
        for link in self._links.values():
            link.shrink()

    def close(self) -> None:
        """Releases all connections, and the memory."""
        for link in self._links.values():
            link.close()

    def _until(
        self,
        done: Callable[[], bool],
        link: LocalLink,
        doing: str,
        look: Callable[[], float] = lambda: math.inf,
    ) -> None:
        """Waits; `done` must not listen: what is heard has to be delivered before this process sleeps."""
        now_s = time.monotonic()
        deadline_s, asks_s = now_s + self._timeout_s, now_s + _PAUSE_S
        while True:
            for each in self._links.values():
                each.deliver()
            if done():
                return
            if link.ended:
                raise PeerLostError(f"{doing} rank {link.peer} failed: it has ended", rank=link.peer)
            now_s = time.monotonic()
            if now_s >= asks_s:
                if self._has_stopped(link.peer):
                    raise PeerLostError(
                        f"{doing} rank {link.peer} failed: it takes no further step", rank=link.peer
                    )
                asks_s = time.monotonic() + _PAUSE_S
            left_s = deadline_s - now_s
            if left_s <= 0:
                raise PeerTimeoutError(
                    f"{doing} rank {link.peer} failed: no answer within {self._timeout_s:g} s. It hangs, or "
                    "is at another place of the script; its log may tell. If it may take longer, raise the "
                    "setting timeout_s.",
                    rank=link.peer,
                )
            self._listen(min(left_s, max(asks_s - now_s, 0.0), look()), once=True)

    def _listen(self, timeout_s: float, *, once: bool = False) -> None:
        """Waits for a word, and records it; also what is said behind it, but if ``once``."""
        for fd, _ in self._poll.poll(min(timeout_s, _LONGEST_POLL_S) * 1000):
            link = self._by_fd[fd]
            link.listen(once=once)  # a second question would mostly have no answer
            if link.ended:
                self._poll.unregister(fd)


def connect_local_peers(
    *, timeout_s: float, has_stopped: Callable[[int], bool] = lambda _: False
) -> LocalPeers | None:
    """Connects the ranks of each host; collective over all ranks of the default process group."""
    sockets = connect_on_this_host(dist.get_rank(), tell_all, what="messages", timeout_s=timeout_s)
    if not sockets:
        return None
    links = {other: LocalLink(connection, other) for other, connection in sockets.items()}
    return LocalPeers(links, timeout_s=timeout_s, has_stopped=has_stopped)

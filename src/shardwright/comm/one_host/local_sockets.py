"""Connects the ranks of a host: each pair gets a packet-preserving Unix socket."""

import contextlib
import logging
import os
import secrets
import selectors
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

from shardwright.comm.one_host.shared_memory import Ring, Segment
from shardwright.comm.trust.private_socket import PrivateListener, call

__all__ = ["connect_on_this_host", "this_host"]

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

"""How the ranks of a host find one another: each pair gets a Unix socket that keeps packets apart."""

import contextlib
import logging
import os
import secrets
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardwright.comm.shared_memory import Ring, Segment

__all__ = ["connect_on_this_host", "this_host"]

log = logging.getLogger(__name__)

TellAll = Callable[[Any], Sequence[Any]]
"""Tells all ranks a fact that can be pickled, and returns what each rank tells, by rank."""


def connect_on_this_host(
    rank: int, tell_all: TellAll, *, what: str, timeout_s: float, host: str | None = None
) -> dict[int, socket.socket] | None:
    """Connects the ranks of each host; collective over all ranks that `tell_all` reaches.

    Ranks are on one host if they share its kernel and its network namespace. ::

        tell all: host, cookie  ──▶  call the lower ranks  ──▶  tell all: done  ──▶  take the calls

    Nobody waits for a rank that cannot: each step is taken only if all ranks of the host took the one before.

    Args:
        rank: of this process.
        tell_all: how the ranks tell one another where they are.
        what: what goes through sockets of the network where this fails, for the log.
        timeout_s: how long each step may take.
        host: what the ranks of this host have in common; found out if it is not given.

    Returns:
        Sockets by rank; none where this host has no other rank. None where one of them lacks what is needed;
        the log says what.

    Raises:
        OSError: a connection that was made could not be taken.
    """
    cookie = secrets.token_hex(16)
    listener, problem = _attempt(lambda: _listen_at(cookie))
    everyone = tell_all((host or this_host(), cookie, problem))
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


def _attempt(do: Callable[[], socket.socket]) -> tuple[socket.socket | None, str]:
    """A socket, or what went wrong."""
    try:
        return do(), ""
    except OSError as error:
        return None, f"{type(error).__name__}: {error}"


def this_host() -> str:
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

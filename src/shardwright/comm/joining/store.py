"""The store at which the ranks of a run meet: its port, sealed values, a board of small values.

Whoever reaches the port of a store can read, write and delete in it. A stranger's value has no valid code and
is refused, with the key's name; so is a value moved from another key or another run. This covers the values
of gloo and NCCL as well, which are given this store.

Three things have no code. `check` and `wait` tell that a value is there, not whose it is: a caller that
relies on it also reads it. `add` counts in the store itself, in plain digits: a counter may only say when to
go on. And a key that a stranger deletes is waited for until the timeout: five minutes where launchers meet at
a run's end.

::

    rank 1: put("mb 0", loss)                       goes on
    rank 0:              ...        get("mb 0")     waits until it is there

No rank has to know which others will read, and an unread value costs only the message to the store. Where a
rank has come by is told when it does not get on, by the thread that tells where it is: who waits for a value
in vain keeps all others waiting, too.
"""

import errno
import os
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from shardwright.comm.joining.run_secret import Seal, not_from_a_stranger
from shardwright.comm.launch_environment import LaunchEnvironment
from shardwright.errors import LaunchError, PeerLostError, PeerTimeoutError

LOOPBACK = "127.0.0.1"


def loopback_tcp_store(port: int = 0, *, timeout_s: float = 300.0) -> TCPStore:
    """Serves a store on the loopback interface alone, where PyTorch would listen on all of them."""
    timeout = timedelta(seconds=timeout_s)
    try:
        listening = _listening(port)
    except OSError as error:
        # This process may serve one there already, which the next group of the same ranks shares.
        if error.errno != errno.EADDRINUSE or port not in _SERVED:
            raise
        return TCPStore(
            LOOPBACK, port, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=True
        )
    port = int(listening.getsockname()[1])
    _SERVED.add(port)
    return TCPStore(
        LOOPBACK,
        port,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listening.detach(),  # from here on it is the store's
    )


# Ports at which this process has served a store: PyTorch serves one a port and process.
_SERVED: set[int] = set()


def _listening(port: int) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after a run that has just ended
        made.bind((LOOPBACK, port))
        made.listen(socket.SOMAXCONN)
    except BaseException:
        made.close()
        raise
    return made


def joined_tcp_store(environment: LaunchEnvironment, *, timeout_s: float) -> Store:
    """Joins the store of a job, or serves it."""
    host, port = environment.master_addr, environment.master_port
    serves = environment.rank == 0 and not environment.launcher_serves_store
    if environment.num_nodes == 1 and not environment.launcher_serves_store:
        host = LOOPBACK  # whatever this host is called
    try:
        if serves and environment.num_nodes == 1:
            return loopback_tcp_store(port, timeout_s=timeout_s)
        socket.getaddrinfo(host, port)
        return TCPStore(
            host,
            port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except socket.gaierror as error:
        raise LaunchError(
            f"{environment}: the host name {host!r} does not resolve ({error.strerror}). "
            "Set MASTER_ADDR to a name or an address of rank 0 that all hosts know."
        ) from error
    except (RuntimeError, OSError) as error:
        raise LaunchError(_no_store(environment, serves=serves, timeout_s=timeout_s, error=error)) from error


def _no_store(environment: LaunchEnvironment, *, serves: bool, timeout_s: float, error: Exception) -> str:
    address = f"{environment.master_addr}:{environment.master_port}"
    first_line = str(error).splitlines()[0]
    if serves:
        return (
            f"{environment} cannot serve the store at {address}: {first_line}. "
            "If another job has the port, set MASTER_PORT to a free one."
        )
    whose = "the launcher" if environment.launcher_serves_store else "rank 0"
    return (
        f"{environment} did not reach the store of {whose} at {address} within {timeout_s:g} s: {first_line}."
        " Check that it runs, that MASTER_ADDR and MASTER_PORT are right, and that no firewall is between."
    )


def limit_silence(store: Any, seconds: float) -> None:
    """Has the system end this process's connections to a store whose host does not answer for so long.

    A client of PyTorch's store waits for an answer without any limit, and nobody tells it that a link is
    down. What it sends is small: nothing but a dead link, or host, keeps the other side from taking it.
    """
    while not isinstance(store, TCPStore):
        store = getattr(store, "_inner", None) or getattr(store, "underlying_store", None)
        if store is None:
            return  # a file, or the memory of this process
    folder = Path("/proc/self/fd")
    # With a default for timeouts, looking at a connection would change it.
    if not folder.is_dir() or socket.getdefaulttimeout() is not None:
        return
    descriptors: list[str] = []
    with suppress(OSError):  # there are too many already
        descriptors = os.listdir(folder)
    for descriptor in descriptors:
        with suppress(OSError):  # it is closed meanwhile, or only listens
            if not os.readlink(folder / descriptor).startswith("socket:"):
                continue
            found = socket.socket(fileno=int(descriptor))
            try:
                if found.family != socket.AF_UNIX and found.getpeername()[1] == store.port:
                    _limit_silence_of(found, seconds)
            finally:
                found.detach()  # it stays its owner's


def _limit_silence_of(connection: socket.socket, seconds: float) -> None:
    probe_s = max(1, round(seconds / _PROBES))
    for name, value in (
        ("TCP_KEEPIDLE", probe_s),
        ("TCP_KEEPINTVL", probe_s),
        ("TCP_KEEPCNT", _PROBES),
        ("TCP_USER_TIMEOUT", round(1000 * seconds)),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


_PROBES = 5


class SealedStore(Store):
    """Seals each value on `set`, and opens it on `get`.

    C++ calls these methods as well, and holds on to the part of the object that is its own alone: somebody
    must hold on to the object as long as a `PrefixStore` or a process group uses it (`session.Session` does).
    """

    def __init__(self, inner: Store, seal: Seal):
        super().__init__()
        self._inner: Any = inner
        self._seal = seal
        self._clones: list[SealedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        self._inner.set(key, self._seal.sealed(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        return self._seal.opened(key, self._inner.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        # Nothing is expected where there is no value yet. The code of a value is always the same.
        sealed = self._seal.sealed(key, _bytes(expected)) if expected else b""
        there = self._inner.compare_set(key, sealed, self._seal.sealed(key, _bytes(desired)))
        return self._seal.opened(key, there)

    def add(self, key: str, amount: int) -> int:
        try:
            return int(self._inner.add(key, amount))
        except RuntimeError as error:
            first_line = str(error).partition("\n")[0]
            raise LaunchError(
                f"the counter {key[:200]!r} of the run's store cannot be used: {first_line}. The process "
                "that "
                "serves the store has ended, or a stranger has written something else than a number there."
            ) from error

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], *timeout: timedelta) -> None:
        self._inner.wait(keys, *timeout)

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: list[str], values: list[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def delete_key(self, key: str) -> bool:
        return bool(self._inner.delete_key(key))

    def num_keys(self) -> int:
        return int(self._inner.num_keys())

    def set_timeout(self, timeout: timedelta) -> None:
        super().set_timeout(timeout)
        self._inner.set_timeout(timeout)

    def has_extended_api(self) -> bool:
        return False  # append, multi_get and multi_set: their callers have other ways

    def clone(self) -> "SealedStore":
        made = SealedStore(self._inner.clone(), self._seal)
        self._clones.append(made)
        return made

    # By these names C++ asks for them. Tried on torch 2.13.
    deleteKey = delete_key
    getNumKeys = num_keys


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)


_LARGEST = 4 * 2**20  # bytes in one message; the store takes no more than 8 MiB
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 2e-5, 2e-3
_DONE = "done"
_PATIENCE_S = 0.25  # from one look at whether the other rank goes on to the next


class _Store(Protocol):
    """The part of a `torch.distributed.Store` that is used."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str) -> bytes: ...

    def check(self, keys: list[str]) -> bool: ...

    def delete_key(self, key: str) -> bool: ...


class ValueBoard:
    """The values that ranks post, batch by batch."""

    def __init__(
        self,
        store: _Store,
        ranks: Sequence[int],
        *,
        rank: int,
        has_ended: Callable[[int], bool],
        timeout_s: float,
    ):
        self._store = store
        self._ranks = tuple(ranks)
        self._rank = rank
        self._has_ended = has_ended
        self._timeout_s = timeout_s
        self.waited_s = 0.0
        self._batch = -1
        self._mine: list[str] = []
        self._marks: dict[str, int] = {}

    def begin(self) -> None:
        """A batch begins; all ranks say so."""
        self._batch += 1
        self.waited_s = 0.0

    def put(self, key: str, value: bytes) -> None:
        """Puts up a value, under a name of its own in this batch."""
        parts = [value[at : at + _LARGEST] for at in range(0, len(value), _LARGEST)]
        for number, part in enumerate(parts[1:]):
            self._set(f"{key}/{number}", part)
        # The first one is there when all are.
        self._set(key, b"%d\n" % (len(parts) - 1) + (parts[0] if parts else b""))

    def mark(self, key: str) -> None:
        """Notes that this rank has come by somewhere in this batch; `tell` says so."""
        self._marks[key] = self._batch

    def tell(self) -> None:
        """Tells the others where this rank has come by; from any thread."""
        for key, batch in self._marks.copy().items():
            self._store.set(f"{key}/{self._rank}", b"%d" % batch)

    def get(
        self,
        keys: Sequence[str],
        source: int,
        absent: Exception,
        *,
        is_late: bool = False,
        mark: str = "",
    ) -> tuple[str, bytes]:
        """Waits for one of several values; returns its name, and the value."""
        begin_s = time.monotonic()
        key = self._first_of(keys, source, absent, is_through=is_late, mark=mark)
        self.waited_s += time.monotonic() - begin_s
        num_further, _, first = self._store.get(self._name(key)).partition(b"\n")
        with not_from_a_stranger("a value of a step"):
            number_of_parts = int(num_further)
        further = (self._store.get(self._name(f"{key}/{number}")) for number in range(number_of_parts))
        return key, b"".join((first, *further))

    def done(self) -> None:
        """This rank puts up nothing more in this batch."""
        self.mark(_DONE)

    def clear(self) -> None:
        """Removes what this rank has posted: all ranks have finished the batch."""
        for name in self._mine:
            self._store.delete_key(name)
        self._mine.clear()

    def _first_of(
        self, keys: Sequence[str], source: int, absent: Exception, *, is_through: bool, mark: str
    ) -> str:
        pause_s, begin_s, next_look_s, ended = _SHORTEST_PAUSE_S, time.monotonic(), _PATIENCE_S, False
        rank = self._ranks[source]
        while True:
            for key in keys:
                if self._store.check([self._name(key)]):
                    return key
            if is_through:
                raise absent
            waited_s = time.monotonic() - begin_s
            if ended:
                raise PeerLostError(f"waiting for a value of rank {rank} failed: it has ended", rank=rank)
            if waited_s > self._timeout_s:
                raise PeerTimeoutError(
                    f"waiting for a value of rank {rank} failed: no answer within {self._timeout_s:g} s",
                    rank=rank,
                )
            if waited_s > next_look_s:
                next_look_s += _PATIENCE_S
                is_through = self._has_marked(source, _DONE) or self._has_marked(source, mark)
                ended = self._has_ended(rank)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _has_marked(self, source: int, key: str) -> bool:
        name = f"{key}/{source}"
        if not key or not self._store.check([name]):
            return False
        with not_from_a_stranger(f"how far rank {self._ranks[source]} is"):
            return int(self._store.get(name)) >= self._batch

    def _set(self, key: str, value: bytes) -> None:
        name = self._name(key)
        self._store.set(name, value)
        self._mine.append(name)

    def _name(self, key: str) -> str:
        return f"{self._batch}/{key}"

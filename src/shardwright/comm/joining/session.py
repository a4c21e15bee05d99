"""One life of a group: its ranks prove that they know the run's secret, and derive a session key.

They are in a folder of mode 0700, so that others cannot even knock, and each end asks the kernel for the user
at the other.

A code under the secret alone would hold for every run with that secret: entries of an earlier life's store
could be replayed. So each rank brings a fresh number, and the key is derived from all of them::

    rank r                                          rank 0
    (1)                                             way := "secret", "none", or "socket" and where
    (2) hello/r := number, code of it
                                                    (3) reads all of them, and has a number of its own
    (4) welcome <──────────────────────────────────     all numbers, their code; or what is wrong
    (5) finds its own number in it
        key := code of all numbers

Where no launcher passes a secret, ranks of one host get one from rank 0 over a Unix socket, where the kernel
tells each end the other's user ("socket"). Ranks of several hosts then have none: they say so, once, and
trust whoever reaches the store.
"""

import contextlib
import os
import secrets
import select
import shutil
import socket
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]

from shardwright.comm.joining.run_secret import (
    CODE_BYTES,
    SECRET,
    SECRET_FILE,
    ForgedError,
    Seal,
    new_secret,
    seal_of_run,
)
from shardwright.comm.joining.store import SealedStore
from shardwright.errors import LaunchError

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LONGEST_PATH = 100  # Linux takes 107 bytes, and there is a name to come


class PrivateListener:
    """A listening socket in a folder of its own."""

    def __init__(self, kind: int):
        if not hasattr(socket, "SO_PEERCRED"):
            raise OSError("this system does not tell who is at the other end of a Unix socket")
        self._folder = _private_folder()
        self.path = str(self._folder / "s")
        self.socket = socket.socket(socket.AF_UNIX, kind)
        try:
            self.socket.bind(self.path)
            self.socket.listen(1024)
        except BaseException:
            self.close()
            raise

    def accept(self) -> socket.socket | None:
        """The next connection, which waits; None where it was another user's, and is closed."""
        taken, _ = self.socket.accept()
        if is_our_user(taken):
            return taken
        taken.close()
        return None

    def close(self) -> None:
        """Closes it, and removes its folder."""
        self.socket.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def call(path: str, kind: int, *, timeout_s: float) -> socket.socket:
    """Connects to a `PrivateListener` of the same user."""
    with _closed_if_it_fails(socket.socket(socket.AF_UNIX, kind)) as caller:
        caller.settimeout(timeout_s)
        caller.connect(path)
        if not is_our_user(caller):
            raise PermissionError(f"another user listens at {path!r:.200}")
        return caller


def is_our_user(connection: socket.socket) -> bool:
    """Whether the process at the other end is of this user, or of root."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(found)
    return user in (os.geteuid(), 0)


def _private_folder() -> Path:
    """A new folder that nobody else can enter, with a path that is short enough."""
    known = (tempfile.gettempdir(), "/dev/shm", "/tmp")
    places = [place for place in known if len(place) < _LONGEST_PATH - 24]
    problem = OSError("no folder for temporary files has a path that is short enough")
    for place in places:
        try:
            return Path(tempfile.mkdtemp(prefix="shardwright-", dir=place))
        except OSError as error:
            problem = error
    raise problem


@contextlib.contextmanager
def _closed_if_it_fails(made: socket.socket) -> Iterator[socket.socket]:
    try:
        yield made
    except BaseException:
        made.close()
        raise


_NUMBER_BYTES = 16
_SECRET_BYTES = 64
_WELCOME, _REFUSED = b"welcome\n", b"refused\n"
_BY_SECRET, _BY_NOTHING, _BY_SOCKET = b"secret", b"none", b"socket "


@dataclass(slots=True)
class Session:
    """The seal that a group's ranks share for one life.

    Attributes:
        seal: under a key that these ranks alone have; None where they have no secret.
    """

    seal: Seal | None
    _kept: list[Store] = field(default_factory=list)

    def store(self, inner: Store) -> Store:
        """The store, with its values sealed as far as there is a seal."""
        if self.seal is None:
            return inner
        made = SealedStore(inner, self.seal)
        self._kept.append(made)
        return made


def begin_session(
    store: Store,
    *,
    rank: int,
    num_ranks: int,
    one_host: bool,
    timeout_s: float,
    environ: Mapping[str, str] = os.environ,
) -> Session:
    """Has the ranks of a group agree on a key; collective over them."""
    if num_ranks == 1:
        return Session(None)
    with _way(store, rank, one_host=one_host, timeout_s=timeout_s, environ=environ) as (seal, problem):
        number = secrets.token_bytes(_NUMBER_BYTES)
        if rank > 0:
            store.set(f"hello/{rank}", number + (seal.code(f"hello/{rank}", number) if seal else b""))  # type: ignore[arg-type]
        if problem:
            raise LaunchError(problem)
        if rank == 0:
            numbers, problem = _hellos(store, seal, number, num_ranks)
            store.set("welcome", _refusal(problem) if problem else _welcome(seal, numbers))  # type: ignore[arg-type]
            if problem:
                raise LaunchError(problem)
        else:
            numbers = _numbers(store.get("welcome"), seal, rank, number, num_ranks)
    return Session(None if seal is None else seal.derived("session", numbers))


# ---- which secret ----


def has_come(store: Store, rank: int) -> bool:
    """Whether a rank has begun to join."""
    return bool(store.check(["way" if rank == 0 else f"hello/{rank}"]))


@contextlib.contextmanager
def _way(
    store: Store, rank: int, *, one_host: bool, timeout_s: float, environ: Mapping[str, str]
) -> Iterator[tuple[Seal | None, str]]:
    """The seal of this rank, and what is wrong where it is not that of rank 0."""
    given = seal_of_run(environ)
    own = _BY_SECRET if given else _BY_SOCKET if one_host and _has_sockets() else _BY_NOTHING
    if rank == 0:
        if own != _BY_SOCKET:
            store.set("way", own)  # type: ignore[arg-type]
            yield given, ""
            return
        secret = new_secret()
        with _handing_out(secret) as path:
            store.set("way", own + path.encode())  # type: ignore[arg-type]
            yield Seal(secret.encode()), ""
        return
    way = store.get("way")
    if not way.startswith(own):
        yield given, _other_way(rank, own, way)
    elif own == _BY_SOCKET:
        yield _fetched(way.removeprefix(own).decode(errors="replace"), rank, timeout_s=timeout_s), ""
    else:
        yield given, ""


def _has_sockets() -> bool:
    return sys.platform == "linux" and hasattr(socket, "SO_PEERCRED")


@contextlib.contextmanager
def _handing_out(secret: str) -> Iterator[str]:
    """Gives the secret to every process of this user that asks, for a while; tells where."""
    listener = PrivateListener(socket.SOCK_STREAM)
    done, end = socket.socketpair()

    def serve() -> None:
        while done not in select.select([listener.socket, done], [], [])[0]:
            with contextlib.suppress(OSError):  # it has left again
                caller = listener.accept()
                if caller is not None:
                    with caller:
                        caller.sendall(secret.encode())  # fits its buffer: nobody can make this wait

    thread = threading.Thread(target=serve, name="shardwright-secret", daemon=True)
    thread.start()
    try:
        yield listener.path
    finally:
        end.close()  # `done` can be read, then
        thread.join()
        done.close()
        listener.close()


def _fetched(path: str, rank: int, *, timeout_s: float) -> Seal:
    try:
        with call(path, socket.SOCK_STREAM, timeout_s=timeout_s) as caller:
            secret = caller.recv(_SECRET_BYTES, socket.MSG_WAITALL)
    except OSError as error:
        raise LaunchError(
            f"rank {rank} cannot get the run's secret from rank 0 over the Unix socket {path!r:.200}: "
            f"{error}. "
            f"All ranks must run on one host as one user; for others, set {SECRET} (openssl rand -hex 32)."
        ) from error
    if len(secret) != _SECRET_BYTES:
        raise LaunchError(f"rank {rank} got no secret from rank 0: it has ended. Look into its log.")
    return Seal(secret)


def _other_way(rank: int, own: bytes, way: bytes) -> str:
    has = {
        _BY_SECRET: "has a secret",
        _BY_NOTHING: "has no secret",
        _BY_SOCKET: "has no secret but its host's",
    }
    theirs = next((text for start, text in has.items() if way.startswith(start)), "says something else")
    return (
        f"rank {rank} {has[own]} ({SECRET} or {SECRET_FILE}), but rank 0 {theirs}, or a stranger who reaches "
        "the store says so. Start all ranks with the same one."
    )


# ---- hello and welcome ----


def _hellos(store: Store, seal: Seal | None, own: bytes, num_ranks: int) -> tuple[bytes, str]:
    """The numbers of all ranks, and what is wrong with one of them."""
    # Its own is not read again: with the greetings of an earlier life, put back, rank 0 would get its key.
    numbers = [own]
    for rank in range(1, num_ranks):
        said = store.get(f"hello/{rank}")
        number, code = said[:_NUMBER_BYTES], said[_NUMBER_BYTES:]
        expected = seal.code(f"hello/{rank}", number) if seal else b""
        if len(number) != _NUMBER_BYTES or not secrets.compare_digest(code, expected):
            theirs = "no secret" if not code else "another secret" if seal else "a secret"
            return b"", (
                f"rank {rank} has {theirs}, where rank 0 has {'one' if seal else 'none'} ({SECRET} or "
                f"{SECRET_FILE}); or a stranger who reaches the store has written in its place. Start all "
                "ranks with the same one."
            )
        numbers.append(number)
    return b"".join(numbers), ""


def _welcome(seal: Seal | None, numbers: bytes) -> bytes:
    return _WELCOME + (seal.code("welcome", numbers) if seal else b"") + numbers


def _refusal(problem: str) -> bytes:
    return _REFUSED + problem.encode()


def _numbers(said: bytes, seal: Seal | None, rank: int, own: bytes, num_ranks: int) -> bytes:
    if said.startswith(_REFUSED):
        text = said.removeprefix(_REFUSED)[:600].decode(errors="replace")
        raise LaunchError("".join(each if each.isprintable() else "?" for each in text))
    content = said.removeprefix(_WELCOME)
    code, numbers = (content[:CODE_BYTES], content[CODE_BYTES:]) if seal else (b"", content)
    expected = seal.code("welcome", numbers) if seal else b""
    at = rank * _NUMBER_BYTES
    is_ours = len(numbers) == num_ranks * _NUMBER_BYTES and numbers[at : at + _NUMBER_BYTES] == own
    if not said.startswith(_WELCOME) or not secrets.compare_digest(code, expected) or not is_ours:
        raise ForgedError(
            f"rank {rank} is not welcomed by a rank that knows its secret: rank 0 has another one, or a "
            f"stranger who reaches the store writes in its place. Start all ranks with the same {SECRET}."
        )
    return numbers

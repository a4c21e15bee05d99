"""The secret of a run, the seals made with it, and the one place that unpickles what a rank sent.

::

    code = HMAC-SHA256(key, length of the name | name | message)        32 bytes, before the message

The name says where the message belongs (a key of the store, a rank, a call), so that no message passes for
another.

The launcher of the ranks makes the secret, and passes it in one of two variables::

    SHARDWRIGHT_SECRET         the secret itself: environments are readable for their user alone
    SHARDWRIGHT_SECRET_FILE    a file that has it, and that nobody else can read (mode 0600)

It appears in no log, run folder or command line, because other users can read those.

A pickle is a program. So it is loaded only with a valid code of the run's secret, which proves that a rank of
this run made it. A run without a secret has no such code, and does not send the user's own objects.
"""

import hmac
import os
import pickle
import secrets
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shardwright.errors import LaunchError, UsageError

CODE_BYTES = 32
_LENGTH = struct.Struct("<I")


class ForgedError(LaunchError):
    """A message has no code, or another one than the key gives."""


@contextmanager
def not_from_a_stranger(what: str) -> Iterator[None]:
    """Reads what stands in a store, which has no code where the ranks have no secret."""
    try:
        yield
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ForgedError(
            f"{what} stands in the run's store in a form that no rank writes ({type(error).__name__}: "
            f"{error}): a stranger has written there. Set SHARDWRIGHT_SECRET, the same on all hosts (openssl "
            "rand -hex 32), and keep strangers off the network between the hosts."
        ) from error


class Seal:
    """Seals messages under one key.

    >>> seal = Seal(b"key")
    >>> seal.opened("greeting", seal.sealed("greeting", b"hello"))
    b'hello'
    """

    __slots__ = ("_key",)

    def __init__(self, key: bytes):
        self._key = key

    def __repr__(self) -> str:
        return "Seal(...)"  # the key is not for logs

    def code(self, name: str, message: bytes) -> bytes:
        """The code of a message at the place of that name."""
        written = name.encode(errors="surrogatepass")
        return hmac.digest(self._key, b"".join((_LENGTH.pack(len(written)), written, message)), "sha256")

    def sealed(self, name: str, message: bytes) -> bytes:
        """The message with its code before it."""
        return self.code(name, message) + message

    def opened(self, name: str, data: bytes) -> bytes:
        """The message of `sealed`."""
        code, message = data[:CODE_BYTES], data[CODE_BYTES:]
        if not hmac.compare_digest(code, self.code(name, message)):
            raise ForgedError(
                f"{name[:200]!r} has {len(data)} bytes without the code that this run's secret gives them: a "
                "stranger has written them, or a rank with another secret. Start all ranks with the same "
                "SHARDWRIGHT_SECRET, new for each run (shardwright run makes it), and keep strangers off the "
                "network between the hosts."
            )
        return message

    def derived(self, name: str, message: bytes) -> "Seal":
        """A separate seal for some purpose; it reveals nothing about this one's key."""
        return Seal(self.code(f"key for {name}", message))


SECRET = "SHARDWRIGHT_SECRET"
SECRET_FILE = "SHARDWRIGHT_SECRET_FILE"

_LEAST_CHARACTERS = 32
_MOST_BYTES = 4096


def new_secret() -> str:
    """A secret that nobody can guess."""
    return secrets.token_hex(32)


def has_secret(environ: Mapping[str, str]) -> bool:
    """Whether a launcher has handed on a secret."""
    return bool(environ.get(SECRET) or environ.get(SECRET_FILE))


def seal_of_run(environ: Mapping[str, str]) -> Seal | None:
    """The seal under the secret that a launcher has handed on; None where it has handed on none."""
    if not has_secret(environ):
        return None
    text, source = environ.get(SECRET, ""), SECRET
    if not text:
        path = Path(environ[SECRET_FILE])
        text, source = _read(path), f"the file {path} of {SECRET_FILE}"
    text = text.strip()
    if len(text) < _LEAST_CHARACTERS:
        raise LaunchError(
            f"{source} has {len(text)} characters, which can be guessed; a secret has {_LEAST_CHARACTERS} at "
            "least. Make one: openssl rand -hex 32"
        )
    return Seal(text.encode(errors="surrogateescape"))


def _read(path: Path) -> str:
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            state = os.fstat(opened)
            if not stat.S_ISREG(state.st_mode):
                raise LaunchError(f"{path} of {SECRET_FILE} is no regular file. Name one of mode 0600.")
            if state.st_mode & 0o077 or state.st_uid not in (os.geteuid(), 0):
                raise LaunchError(
                    f"{path} of {SECRET_FILE} has mode {state.st_mode & 0o777:04o} and belongs to user "
                    f"{state.st_uid}: others can read or replace it. Make it your own: chmod 600 {path}"
                )
            return os.read(opened, _MOST_BYTES).decode(errors="surrogateescape")
        finally:
            os.close(opened)
    except OSError as error:
        raise LaunchError(
            f"{path} of {SECRET_FILE} cannot be read: {error.strerror}. It must be on every host, with the "
            "same secret."
        ) from error


_HINT = "for example export SHARDWRIGHT_SECRET=$(openssl rand -hex 32) before srun, mpirun or torchrun"


def packed(
    thing: Any, seal: Seal | None, place: str, *, dumps: Callable[[Any], bytes] = pickle.dumps
) -> bytes:
    """An object as bytes."""
    return _sealed(dumps(thing) if seal is not None else b"", thing, seal, place)


def unpacked(
    data: bytes, seal: Seal | None, place: str, *, loads: Callable[[bytes], Any] = pickle.loads
) -> Any:
    """The object of `packed`."""
    return loads(_opened(data, seal, place))


def _sealed(data: bytes, thing: Any, seal: Seal | None, place: str) -> bytes:
    if seal is None:
        kind = type(thing)
        raise UsageError(
            f"a {kind.__module__}.{kind.__qualname__} can travel between ranks by pickle alone, and a pickle "
            "of another rank is loaded only where the ranks share a secret, which they do not here. Set one, "
            f"the same on all hosts ({_HINT}), or pass tensors, numbers, text, lists and dictionaries."
        )
    return seal.sealed(_name(place), data)


def _opened(data: bytes, seal: Seal | None, place: str) -> bytes:
    if seal is None:
        raise UsageError(
            "another rank sends a pickle, and this rank has no secret by which to know that a rank of the "
            f"run has made it. Set one, the same on all hosts ({_HINT})."
        )
    return seal.opened(_name(place), data)


def _name(place: str) -> str:
    return f"pickle: {place}"

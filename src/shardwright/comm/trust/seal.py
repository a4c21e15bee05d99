"""Message authentication codes: without the key, nobody can write or change a message.

::

    code = HMAC-SHA256(key, length of the name | name | message)        32 bytes, before the message

The name says where the message belongs (a key of the store, a rank, a call), so that no message passes for
another.
"""

import hmac
import struct
from collections.abc import Iterator
from contextlib import contextmanager

from shardwright.errors import LaunchError

__all__ = ["CODE_BYTES", "ForgedError", "Seal", "not_from_a_stranger"]

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

"""Unix sockets between processes of one user; the kernel identifies the other end.

They are in a folder of mode 0700, so that others cannot even knock, and each end asks the kernel for the user
at the other.
"""

import contextlib
import os
import shutil
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

__all__ = ["PrivateListener", "call", "is_our_user"]

_CREDENTIALS = struct.Struct("3i")  # process, user, group
_LONGEST_PATH = 100  # Linux takes 107 bytes, and there is a name to come


class PrivateListener:
    """A listening socket in a folder of its own.

    Attributes:
        path: by which others call it.
    """

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

"""File systems of their own for tests: small ones that fill up, and ones that become read-only.

A child process gets a mount namespace of its own: nothing outside of it sees what is mounted there, and it is
gone when the child ends, however it ends.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path

_NEW_NAMESPACE = 0x00020000
_READ_ONLY, _REMOUNT, _RECURSIVE, _PRIVATE = 1, 32, 1 << 14, 1 << 18


class SmallDisk:
    """A file system in memory."""

    def __init__(self, path: Path, num_bytes: int):
        self.path = path
        self._size = f"size={num_bytes}".encode()
        self._mount(0)

    @property
    def free_bytes(self) -> int:
        """What still fits."""
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def set_read_only(self, read_only: bool) -> None:
        """Lets nobody write, or everybody again."""
        self._mount(_REMOUNT | (_READ_ONLY if read_only else 0))

    def fill(self, *, leaving: int) -> Path:
        """Makes a file that leaves so many bytes of room."""
        filler = self.path / "filler"
        with filler.open("wb") as file:
            file.write(b"\0" * max(0, self.free_bytes - leaving))
        return filler

    def _mount(self, flags: int) -> None:
        _mount(b"tmpfs", self.path, b"tmpfs", flags, self._size)


def in_own_mounts(run: Callable[[], None]) -> None:
    """Runs something in a child process that may mount what it likes."""
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _leave_namespace()
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(code)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child with its own mounts ended with {os.waitstatus_to_exitcode(status)}"


@cache
def can_mount() -> bool:
    """Whether this process may do so: it takes root, and a system that has namespaces."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder:
        tried = subprocess.run([sys.executable, __file__, folder], capture_output=True, check=False)
    return tried.returncode == 0


def _leave_namespace() -> None:
    _check(ctypes.CDLL(None, use_errno=True).unshare(_NEW_NAMESPACE), "unshare")
    _mount(b"none", Path("/"), None, _RECURSIVE | _PRIVATE, None)


def _mount(source: bytes, target: Path, kind: bytes | None, flags: int, options: bytes | None) -> None:
    made = ctypes.CDLL(None, use_errno=True).mount(
        source, os.fsencode(target), kind, ctypes.c_ulong(flags), options
    )
    _check(made, f"mount {target}")


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


if __name__ == "__main__":  # ends with 1 where it is not allowed
    _leave_namespace()
    SmallDisk(Path(sys.argv[1]), 2**16).set_read_only(True)

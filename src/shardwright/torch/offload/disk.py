"""A file on a local disk that holds what units keep, on machines that compute where their memory is.

One thread copies in both directions, in the order of the calls::

    rank      [ unit 0 ][ unit 1 ][ unit 2 ]           [ unit 2' ][ unit 1' ][ unit 0' ]
    thread              [ write 0 ][ write 1 ]   [ read 1 ]   [ read 0 ]

The file has no name: it is gone when the process ends, however it ends. It is written and read by calls, not
mapped: a full disk is an error of a call, where a mapping would kill the process, and mapped pages would
count as its memory.
"""

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO, NamedTuple

from torch import Tensor

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.quantities import format_bytes

log = logging.getLogger(__name__)

_IN_MEMORY = frozenset(("tmpfs", "ramfs", "devtmpfs"))
_MOUNTS = Path("/proc/self/mountinfo")


def disk_folder(config: Config, *, warns: bool) -> Path:
    """The folder of temporary files, or of runs if only that is on a disk."""
    choices = [Path(tempfile.gettempdir())]
    if config.run_dir != "off":
        choices.append(Path(config.run_dir))
    found = next((folder for folder in choices if not is_in_memory(folder)), None)
    if found is None and warns:
        log.warning(
            "activations are offloaded to %s, which is in memory itself (tmpfs): that frees none. Set "
            "TMPDIR to a folder on a disk.",
            choices[0],
        )
    return (found or choices[0]).absolute()


def is_in_memory(folder: Path) -> bool:
    """Whether what lies in a folder takes memory; False where the system does not tell."""
    try:
        table = _MOUNTS.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    path = folder.resolve()
    depth, kind = -1, ""
    for line in table.splitlines():
        fields, _, rest = line.partition(" - ")
        point = Path(_unescaped(fields.split()[4]))
        # Of several file systems at one place, the last one is seen.
        if path.is_relative_to(point) and len(point.parts) >= depth:
            depth, kind = len(point.parts), rest.split()[0]
    return kind in _IN_MEMORY


def _unescaped(text: str) -> str:
    """A path as the kernel writes it: blanks and the like as octal numbers."""
    return text.encode("latin-1", "replace").decode("unicode_escape")


_PAGE_BYTES = 4096
_MOST_BYTES = 2**30  # of one call to the kernel


class _Place(NamedTuple):
    """Bytes of the file."""

    offset: int
    num_bytes: int


class _DiskCopy:
    """See `Copy`. The thread begins it, or the rank skips it: whoever comes first, under the lock."""

    __slots__ = ("_done", "_error", "_has_begun", "_is_skipped", "_lock", "_seconds")

    def __init__(self) -> None:
        self._done = threading.Event()
        self._error: str | None = None
        self._seconds = (0.0, 0.0)
        self._lock = threading.Lock()
        self._has_begun = self._is_skipped = False

    @property
    def is_done(self) -> bool:
        """Whether the thread is through with it."""
        if not self._done.is_set():
            return False
        self._raise()
        return True

    def wait(self) -> None:
        """Blocks until the thread is through with it."""
        self._done.wait()
        self._raise()

    def skip(self) -> bool:
        """Has the thread leave it out, unless it has begun; whether it is left out."""
        with self._lock:
            self._is_skipped = not self._has_begun
            return self._is_skipped

    def seconds(self) -> tuple[float, float]:
        """When it began and ended."""
        return self._seconds

    def run(self, copy: Callable[[], None], where: str) -> None:
        """Makes the copy, unless it is left out; called by the thread."""
        with self._lock:
            self._has_begun = not self._is_skipped
        if not self._has_begun:
            return
        begin_s = time.perf_counter()
        self._seconds = begin_s, begin_s
        try:
            copy()
        except Exception as error:  # whatever it is, somebody waits for this copy, and raises it there
            self._error = f"{where}: {getattr(error, 'strerror', None) or error}"
        self._seconds = begin_s, time.perf_counter()

    def end(self) -> None:
        """The thread has let go of everything."""
        self._done.set()

    def _raise(self) -> None:
        if self._error is not None:
            raise UsageError(
                f"activations that are kept on disk cannot be copied: {self._error}. Set TMPDIR to a "
                "folder on another disk, or offload_activations to false."
            )


class DiskTier:
    """See `Tier`."""

    def __init__(self, folder: Path, *, cores: set[int] | None = None):
        self._folder = folder
        self._cores = cores
        self._file: BinaryIO | None = None
        self._thread: threading.Thread | None = None
        self._queue: SimpleQueue[tuple[_DiskCopy, Callable[[], None]] | None] = SimpleQueue()
        self._size = 0  # bytes that the disk has given
        self._end = 0  # of them, those that were in use since the file was empty
        self._taken = 0  # places in use
        self._free: dict[int, list[_Place]] = {}

    def reserve(self, num_bytes: int) -> None:
        self._grow(num_bytes)

    def write(self, memory: Tensor) -> tuple[_Place, _DiskCopy]:
        """Starts to write bytes behind."""
        place = self._new_place(memory.nbytes)
        return place, self._begin(memory, place, _write)

    def read(self, place: _Place, memory: Tensor) -> _DiskCopy:
        """Starts to read bytes ahead."""
        return self._begin(memory, place, _read)

    def free(self, place: _Place) -> None:
        """Another write may take the place; the thread makes copies in order, so none is disturbed."""
        self._taken -= 1
        self._free.setdefault(place.num_bytes, []).append(place)
        if not self._taken:
            # Batches of other shapes would never find places of their sizes.
            self._free.clear()
            self._end = 0

    def close(self) -> None:
        """Ends the thread, and gives the disk its room back."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        if self._file is not None:
            self._file.close()
            self._file = None
            self._size = self._end = 0

    # ---- inside ----

    def _new_place(self, num_bytes: int) -> _Place:
        num_bytes += -num_bytes % _PAGE_BYTES
        free = self._free.get(num_bytes)
        if free:
            self._taken += 1
            return free.pop()
        place = _Place(self._end, num_bytes)
        self._grow(place.offset + num_bytes)
        self._end += num_bytes
        self._taken += 1
        return place

    def _grow(self, size: int) -> None:
        """Has the disk give room, all at once: a write that finds none would fail in the thread."""
        if size <= self._size:
            return
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115
            os.posix_fallocate(self._file.fileno(), self._size, size - self._size)
        except OSError as error:
            raise UsageError(
                f"activations are offloaded to {self._folder}, which has no room for {format_bytes(size)} "
                f"({error.strerror}; {_free_text(self._folder)}). Set TMPDIR to a folder on another "
                "disk, take more microbatches, or set offload_activations to false."
            ) from error
        self._size = size

    def _begin(
        self, memory: Tensor, place: _Place, function: Callable[[int, memoryview, int], None]
    ) -> _DiskCopy:
        assert self._file is not None
        copy, number, offset = _DiskCopy(), self._file.fileno(), place.offset
        content = memoryview(memory.numpy())  # type: ignore[arg-type]
        self._queue.put((copy, lambda: function(number, content, offset)))
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="activations on disk", daemon=True)
            self._thread.start()
        return copy

    def _run(self) -> None:
        if self._cores is not None:
            with suppress(OSError):  # the cores may have been taken away since
                os.sched_setaffinity(0, self._cores)  # of this thread: that of the rank has its own
        where = str(self._folder)
        while True:
            entry = self._queue.get()
            if entry is None:
                return
            copy, function = entry
            copy.run(function, where)
            # Whoever waits must find that nobody else holds the memory.
            del entry, function
            copy.end()
            del copy


def _write(number: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        done += os.pwrite(number, content[done : done + _MOST_BYTES], offset + done)


def _read(number: int, content: memoryview, offset: int) -> None:
    done = 0
    while done < len(content):
        count = os.preadv(number, [content[done : done + _MOST_BYTES]], offset + done)
        if not count:
            raise OSError(0, "the file ends too early")
        done += count


def _free_text(folder: Path) -> str:
    try:
        status = os.statvfs(folder)
    except OSError:
        return "its free room is not known"
    return f"{format_bytes(status.f_bavail * status.f_frsize)} are free"

"""A process with the script's libraries imported, of which ranks are forked when they start again.

::

    rank 0, after a step ──its libraries──► file ──► standby: imports them, and waits
    supervisor ──words, variables, pipes──► standby ──fork──► rank: runs the script as Python would
               ◄── process; its exit code ──┘

Half of a restart is imports. Where something speaks against a fork (a library with threads, imports that are
under way), a rank starts in an interpreter of its own, as all ranks did at first. The script's own modules
are not imported ahead, and it finds its process as a new one.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO

from shardwright.after_import import objects_are_frozen
from shardwright.launch.processes import die_with_parent, kill_group, num_threads
from shardwright.libraries import LIBRARIES, read_libraries

_BEGIN = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from shardwright.launch.ranks.standby import main; exec(*main())"
)
_SIZE = struct.Struct("=I")
_NUMBER = struct.Struct("=i")
_OF_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 0.5
_ANSWER_S = 5.0


class Standby:
    """Starts the process once a rank has told its libraries, and ends it with this object's context.

    Attributes:
        process: None before a rank has told its libraries.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self.process: subprocess.Popen[bytes] | None = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shardwright-standby", daemon=True)

    def __enter__(self) -> "Standby":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not (self._folder / LIBRARIES).exists():
            if self._end.wait(_LOOK_S):
                return
        _, _, variables = read_libraries(self._folder / LIBRARIES)
        self.process = subprocess.Popen(
            [sys.executable, "-u", "-c", _BEGIN, str(self._folder), str(os.getpid())],
            env={**os.environ, **variables},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._end.wait()
        self.process.kill()
        self.process.wait()


class ForkedScript:
    """A script in a process of the standby, as `subprocess.Popen` has those of its own."""

    def __init__(self, connection: socket.socket, pid: int, stdout: BinaryIO, stderr: BinaryIO):
        self._connection = connection
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None

    def fileno(self) -> int:
        """A descriptor that can be read when the script has ended."""
        return self._connection.fileno()

    def close(self) -> None:
        """Lets go of it, and of what it writes; the standby ends it if it runs."""
        for each in (self._connection, self.stdout, self.stderr):
            each.close()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            told = self._connection.recv(_NUMBER.size)
            # The standby has gone, and the kernel has killed the script with it.
            self.returncode = _NUMBER.unpack(told)[0] if len(told) == _NUMBER.size else -signal.SIGKILL
        return self.returncode


def forked(folder: Path, words: Sequence[str], environ: Mapping[str, str]) -> ForkedScript | None:
    """Has the standby of a launcher run a script; None where it cannot.

    Args:
        words: the script and its own words, or ``-m``, a module, and its words.
    """
    if words[0] != "-m" and not words[0].endswith(".py"):
        return None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    pipes = [os.pipe(), os.pipe()]
    try:
        connection.settimeout(_ANSWER_S)
        connection.connect(str(folder / "standby"))
        request = json.dumps([os.getcwd(), list(words), dict(environ)]).encode()
        socket.send_fds(connection, [_SIZE.pack(len(request))], [write for _, write in pipes])
        connection.sendall(request)
        pid = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))[0]
    except (OSError, struct.error):
        connection.close()  # the standby kills what it has forked for it
        for read, write in pipes:
            os.close(read)
            os.close(write)
        return None
    connection.settimeout(None)
    for _, write in pipes:
        os.close(write)
    out, err = (os.fdopen(read, "rb", buffering=0) for read, _ in pipes)
    return ForkedScript(connection, pid, out, err)


# ---- in the standby ----


def main() -> tuple[CodeType, dict[str, Any]]:
    """Imports, and forks ranks; returns in these alone, with what they have to run."""
    folder, agent_pid = Path(sys.argv[1]), int(sys.argv[2])
    # Schedulers send them to all processes: ranks have them from their supervisors, and decide.
    before = {number: signal.signal(number, signal.SIG_IGN) for number in _OF_RANKS}
    search_path = list(sys.path)
    names, sys.path[:], _ = read_libraries(folder / LIBRARIES)
    for name in names:
        with suppress(Exception):  # it is another one than in the rank; the script will say so itself
            importlib.import_module(name)
    if _has_threads():
        sys.exit(1)  # a fork has one thread, and no other's locks
    sys.path[:] = search_path
    gc.collect()
    gc.freeze()  # ranks share these pages as long as nobody writes to them
    objects_are_frozen()  # counted here, and not by each rank
    words = _serve(folder / "standby", agent_pid)
    for number, handler in before.items():
        signal.signal(number, handler)
    return _as_main(words)


def _has_threads() -> bool:
    """Whether others than Python's main one stay where a process is forked; OpenBLAS ends its own before."""
    if num_threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return num_threads() > 1


def _serve(path: Path, agent_pid: int) -> list[str]:
    """Forks a process for each request, and tells how it ended; returns in these, with their words."""
    wakeup, write_end = os.pipe()
    for descriptor in (wakeup, write_end):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    connections: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"{path}-")
        listener.listen()
        os.rename(f"{path}-", path)  # who finds it is heard
        while connections or os.getppid() == agent_pid:  # ranks may save when the agent has gone
            by_fd = {connection.fileno(): pid for pid, connection in connections.items()}
            ready, _, _ = select.select([listener.fileno(), wakeup, *by_fd], [], [], _LOOK_S)
            if wakeup in ready:
                os.read(wakeup, 64)
                _tell_ended(connections)
            for descriptor in by_fd.keys() & set(ready):
                kill_group(by_fd[descriptor])  # its supervisor has gone
                connections.pop(by_fd[descriptor], None)
            if listener.fileno() in ready:
                connection, _ = listener.accept()
                request = _read(connection)
                if request is None:
                    continue
                own_pid, pid = os.getpid(), os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    for other in (connection, *connections.values()):
                        other.close()
                    for descriptor in (wakeup, write_end):
                        os.close(descriptor)
                    return _as_new(*request, parent_pid=own_pid)
                *_, pipes = request
                for pipe in pipes:
                    os.close(pipe)
                connections[pid] = connection
                with suppress(OSError):  # it has left again, which the next look finds
                    connection.sendall(_NUMBER.pack(pid))
    sys.exit(0)


def _tell_ended(connections: dict[int, socket.socket]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if (connection := connections.pop(ended[0], None)) is not None:
                with connection, suppress(OSError):
                    connection.sendall(_NUMBER.pack(os.waitstatus_to_exitcode(ended[1])))


_Request = tuple[str, list[str], dict[str, str], list[int]]


def _read(connection: socket.socket) -> _Request | None:
    """The folder, words and variables of a script, and its pipes; None where nobody asks any more."""
    connection.settimeout(_ANSWER_S)
    pipes: list[int] = []
    try:
        head, pipes, _, _ = socket.recv_fds(connection, _SIZE.size, 2)
        (size,) = _SIZE.unpack(head)
        with connection.makefile("rb") as file:
            folder, words, environ = json.loads(file.read(size))
    except (OSError, ValueError, struct.error):
        for pipe in pipes:
            os.close(pipe)
        connection.close()
        return None
    return folder, words, environ, pipes


def _as_new(
    folder: str, words: list[str], environ: dict[str, str], pipes: Sequence[int], *, parent_pid: int
) -> list[str]:
    """Makes a forked process what one would be that has just been started; returns the script's words."""
    die_with_parent(parent_pid)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for pipe, descriptor in zip(pipes, (1, 2), strict=True):
        os.dup2(pipe, descriptor)
        os.close(pipe)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    if "numpy" in sys.modules:  # Python seeds its own in each fork
        sys.modules["numpy"].random.seed()
    return words


def _as_main(words: list[str]) -> tuple[CodeType, dict[str, Any]]:
    """The code of a script, or of what runs a module, and the names of ``__main__`` as they are at first."""
    own = vars(sys.modules["__main__"])
    for name in own.keys() - {"__builtins__", "__doc__", "__name__", "__package__"}:
        del own[name]
    safe = sys.flags.safe_path
    if words[0] == "-m":
        sys.argv = words[1:]
        sys.path[:0] = [] if safe else [os.getcwd()]
        run = f"import runpy; runpy._run_module_as_main({words[1]!r})"
        return compile(run, "<string>", "exec"), own
    file = os.path.abspath(words[0])
    sys.argv = words
    sys.path[:0] = [] if safe else [os.path.dirname(os.path.realpath(file))]
    loader = SourceFileLoader("__main__", file)
    own.update(__annotations__={}, __cached__=None, __file__=file, __loader__=loader, __spec__=None)
    return loader.source_to_code(loader.get_data(file), file), own

"""A process with the script's libraries imported, of which the ranks of a host are forked.

::

    launcher ──the script, a socket──► standby: imports what the script imports first, and waits
    supervisor ──words, variables, pipes──► standby ──fork──► rank: runs the script as Python would
               ◄── process; its exit code ──┘

Most of a start is imports, and PyTorch is imported here once for all ranks, while the launcher imports it
too. Where something speaks against a fork (a library with threads, a module beside the script that is named
like one of Python's), ranks start in interpreters of their own. Nothing is imported once ranks are there:
they are this process's children, and end with it. A script finds its process as a new one.
"""

import ast
import contextlib
import gc
import importlib
import importlib.util
import itertools
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Any, BinaryIO

from shardwright.after_import import objects_are_frozen
from shardwright.errors import LaunchError
from shardwright.launch.processes import die_with_parent, kill_group, num_threads
from shardwright.quantities import MOST_RANKS_OF_HOST

_BEGIN = (
    "import sys; sys.flags.safe_path or sys.path.pop(0); "
    "from shardwright.launch.ranks.standby import main; exec(*main())"
)
STANDBY = "standby"
"""The name of its socket."""

_AHEAD = ("numpy", "safetensors", "shardwright.torch", "tokenizers", "torch", "torchvision", "tqdm", "yaml")
"""Libraries that may be imported before a script begins: they start no threads, and ask for no rank."""
_AHEAD_WITHOUT_DATASETS = ("accelerate", "peft", "transformers")
"""More of them, unless they find `datasets`: they import it, and it starts threads."""
_OF_EACH_RUN = (
    "torch._dynamo",  # an optimizer imports it
    "shardwright.torch.startup",
    "shardwright.torch.measuring.planning",
    "shardwright.torch.step_function",
    "shardwright.torch.checkpoints.checkpoints",
    "shardwright.comm.collectives.shardwright_process_group",
)
"""What each rank imports otherwise, one by one, in `init` and after it."""
_OURS = ("shardwright", "smdistributed")
_SIZE = struct.Struct("=I")
_NUMBER = struct.Struct("=i")
_OF_RANKS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_LOOK_S = 0.5
_ANSWER_S = 60.0
_READ_S = 5.0


@contextlib.contextmanager
def standby(folder: Path, script: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts the process, which listens at `folder`, and ends it with the context.

    Args:
        script: the file of which imports are made ahead.

    Raises:
        LaunchError: the folder can have no socket.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            with _address(folder) as address:
                listener.bind(address)
        except OSError as error:
            raise LaunchError(
                f"{folder} can have no socket: {error.strerror}. Name another folder for temporary files, as "
                "by TMPDIR=/tmp."
            ) from error
        listener.listen(MOST_RANKS_OF_HOST)  # they may all ask at once, and wait for what is imported
        words = (str(listener.fileno()), script, str(os.getpid()))
        process = subprocess.Popen(
            [sys.executable, "-u", "-c", _BEGIN, *words],
            pass_fds=(listener.fileno(),),
            # What is closed would be none in ranks, either, which write to pipes.
            stdout=subprocess.DEVNULL if sys.stdout is None else None,
            stderr=subprocess.DEVNULL if sys.stderr is None else None,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def _address(folder: Path) -> Iterator[str]:
    """Where it listens, in few characters: the path of a socket has at most 107."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}/{STANDBY}"
    finally:
        os.close(descriptor)


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
        words: the script and its own words.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    pipes = [os.pipe(), os.pipe()]
    try:
        connection.settimeout(_ANSWER_S)
        with _address(folder) as address:
            connection.connect(address)
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
    listener_fd, script, agent_pid = sys.argv[1:]
    # Schedulers send them to all processes: ranks have them from their supervisors, and decide. A rank may
    # get one as soon as it is forked.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _OF_RANKS)
    with socket.socket(fileno=int(listener_fd)) as listener:
        listener.set_inheritable(False)
        if _has_modules_named_like_others(script):
            sys.exit(1)
        _import_first(script)
        if _has_threads():
            sys.exit(1)  # a fork has one thread, and no other's locks
        gc.collect()
        gc.freeze()  # ranks share these pages as long as nobody writes to them
        objects_are_frozen()  # counted here, and not by each rank
        for descriptor in (1, 2):  # whoever reads them waits for their end
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
        words = _serve(listener, int(agent_pid))
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return _as_main(words)


def _has_modules_named_like_others(script: str) -> bool:
    """Whether modules beside a script are named like Python's or like known libraries.

    The script means its own ones, and others may be here already.
    """
    folder = Path(script).resolve().parent
    names = {*sys.stdlib_module_names, *(name.partition(".")[0] for name in _AHEAD + _AHEAD_WITHOUT_DATASETS)}
    return any((folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists() for name in names)


def _import_first(script: str) -> None:
    """Runs the imports with which a script begins, up to the first line that may be meant for others.

    With PyTorch among them, a script that imports us anywhere has all of us imported, too.
    """
    with suppress(Exception), _search_path(_search_path_of(script)):
        whole = ast.parse(Path(script).read_bytes())
        for line in itertools.takewhile(_is_known, whole.body):
            if _libraries(line):
                with suppress(Exception):  # the script will say so itself
                    _import(line)
        imports = [name for each in ast.walk(whole) for name in _modules(each)]
        if "torch" in sys.modules and any(name.partition(".")[0] in _OURS for name in imports):
            for name in _OF_EACH_RUN:
                importlib.import_module(name)


def _import(line: ast.stmt) -> None:
    """Imports what a line does, and names of modules that are imported when they are asked for."""
    for name in _modules(line):
        module = importlib.import_module(name)
        for each in line.names if isinstance(line, ast.ImportFrom) else ():
            getattr(module, each.name, None)


def _is_known(line: ast.stmt) -> bool:
    """Whether a line is an import of what may be imported ahead, or a docstring."""
    if isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant):
        return True
    more = () if importlib.util.find_spec("datasets") else _AHEAD_WITHOUT_DATASETS
    known = tuple(f"{name}." for name in (*_AHEAD, *more))
    return _modules(line) != [] and all(f"{name}.".startswith(known) for name in _libraries(line))


def _libraries(line: ast.stmt) -> list[str]:
    return [name for name in _modules(line) if name.partition(".")[0] not in sys.stdlib_module_names]


def _modules(line: ast.AST) -> list[str]:
    """The modules that a line imports.

    >>> [_modules(line) for line in ast.parse("import os, torch.nn; from a import b; from . import c").body]
    [['os', 'torch.nn'], ['a'], []]
    """
    match line:
        case ast.Import(names):
            return [each.name for each in names]
        case ast.ImportFrom(str(module), level=0):
            return [module]
    return []


@contextlib.contextmanager
def _search_path(places: Sequence[str]) -> Iterator[None]:
    own, sys.path[:] = list(sys.path), places
    try:
        yield
    finally:
        sys.path[:] = own


def _search_path_of(script: str) -> list[str]:
    """Where a script's modules are looked for, its folder first, as Python has it."""
    return [*([] if sys.flags.safe_path else [os.path.dirname(os.path.realpath(script))]), *sys.path]


def _has_threads() -> bool:
    """Whether others than Python's main one stay where a process is forked; OpenBLAS ends its own before."""
    if num_threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return num_threads() > 1


def _serve(listener: socket.socket, agent_pid: int) -> list[str]:
    """Forks a process for each request, and tells how it ended; returns in these, with their words."""
    wakeup, write_end = os.pipe()
    for descriptor in (wakeup, write_end):
        os.set_blocking(descriptor, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(write_end)
    connections: dict[int, socket.socket] = {}
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
            *_, pipes = request
            own_pid = os.getpid()
            try:
                pid = os.fork()
            except OSError:  # no more processes, or no memory: that rank begins by itself, or says so
                connection.close()
                for pipe in pipes:
                    os.close(pipe)
                continue
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for other in (connection, *connections.values()):
                    other.close()
                for descriptor in (wakeup, write_end):
                    os.close(descriptor)
                return _as_new(*request, parent_pid=own_pid)
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
    connection.settimeout(_READ_S)
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
    """The code of a script, and the names of ``__main__`` as they are at first."""
    own = vars(sys.modules["__main__"])
    for name in own.keys() - {"__builtins__", "__doc__", "__name__", "__package__"}:
        del own[name]
    sys.orig_argv = [sys.executable, "-u", *words]
    file = os.path.abspath(words[0])
    sys.argv = words
    sys.path[:] = _search_path_of(file)
    loader = SourceFileLoader("__main__", file)
    own.update(__annotations__={}, __cached__=None, __file__=file, __loader__=loader, __spec__=None)
    try:
        return loader.source_to_code(loader.get_data(file), file), own
    except SyntaxError as error:
        traceback.print_exception(error.with_traceback(None))  # as Python does, without what called it
        sys.exit(1)

"""The records that caller, fork server and ranks exchange, and the functions packed for the ranks."""

import functools
import socket
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from shardwright.comm.codec import declare, decode, encode
from shardwright.comm.joining.run_secret import Seal, packed
from shardwright.errors import UsageError

StopReason = Literal["timeout", "grace"]

_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One function to run on some ranks.

    Attributes:
        key: under which the objects of this job are sealed; only the caller, the server and the ranks have
        it. payload: cloudpickle of the function, its arguments and the warning filters; only ranks open it.
        preload: modules that the server imports before it forks.
        timeout_s: seconds from the first fork until every rank is killed.
        grace_s: seconds that the others get after the first rank failed; None: until the timeout.
        group_timeout_s: the timeout of the process group's operations.
        folder: where the ranks leave what they have to say, see `RankFiles`.
    """

    key: bytes
    payload: bytes
    environ: tuple[dict[str, str], ...]
    working_folder: str
    search_path: tuple[str, ...]
    preload: tuple[str, ...]
    timeout_s: float
    grace_s: float | None
    group_timeout_s: float
    init_process_group: bool
    folder: str

    @property
    def num_ranks(self) -> int:
        return len(self.environ)

    @property
    def seal(self) -> Seal:
        return Seal(self.key)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankStatus:
    """The server's view of a rank.

    Attributes:
        exit_code: as `subprocess` counts: minus the signal's number for a rank that a signal ended.
        started_at_s: when it was forked (`time.monotonic`, one clock for all processes of a machine).
        stopped: why the server killed it, if it did.
        was_held: it did not run at that moment, because of SIGSTOP, so that it could not write its stacks.
    """

    rank: int
    exit_code: int
    started_at_s: float
    ended_at_s: float
    stopped: StopReason | None
    was_held: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """A rank's report on itself.

    Attributes:
        at_s: when the function ended (`time.monotonic`).
        value: cloudpickle of what the function returned, if it did.
        error: the traceback as text, if the function raised.
        error_line: the class and the first line of the message.
        exception: cloudpickle of the exception, where it has one.
        exit_code: with which the rank means to end.
    """

    at_s: float
    value: bytes | None = None
    error: str | None = None
    error_type: str | None = None
    error_line: str | None = None
    exception: bytes | None = None
    exit_code: int = 0


@dataclass(frozen=True, slots=True)
class RankFiles:
    """The files that a rank leaves in its job's folder."""

    folder: Path
    rank: int

    @property
    def stdout(self) -> Path:
        return self.folder / f"rank{self.rank}.stdout"

    @property
    def stderr(self) -> Path:
        return self.folder / f"rank{self.rank}.stderr"

    @property
    def stacks(self) -> Path:
        """Python stacks, written when the server asks for them."""
        return self.folder / f"rank{self.rank}.stacks"

    @property
    def report(self) -> Path:
        """The `RankReport`; missing if the rank died before its function ended."""
        return self.folder / f"rank{self.rank}.report"


declare(Job, RankStatus, RankReport)


def send(channel: socket.socket, message: Any) -> None:
    data = encode(message)
    channel.sendall(_LENGTH.pack(len(data)) + data)


def receive(channel: socket.socket) -> Any:
    (length,) = _LENGTH.unpack(_receive_exactly(channel, _LENGTH.size))
    return decode(_receive_exactly(channel, length))


def _receive_exactly(channel: socket.socket, num_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < num_bytes:
        try:
            chunk = channel.recv(min(num_bytes - len(data), 2**20))
        except ConnectionResetError:
            chunk = b""
        if not chunk:
            raise EOFError("the other end of the channel is closed")
        data += chunk
    return bytes(data)


PAYLOAD = "what ranks run"


def value_place(rank: int) -> str:
    """What the result of a rank is called where it is sealed."""
    return f"what rank {rank} returns or raises"


def payload(thing: object, *, function: Callable[..., Any], seal: Seal) -> bytes:
    """Pickles a function with its dependencies."""
    cloudpickle = _cloudpickle()
    module = _module_of(function)
    # A rank need not, and often could not, import a test module: it is not on the path, and imports much.
    by_value = module is not None and _is_a_script(module)
    if by_value:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = packed(thing, seal, PAYLOAD, dumps=cloudpickle.dumps)
    except Exception as error:
        raise UsageError(
            f"{_name(function)} cannot travel to the ranks: {type(error).__name__}: {error}. The function, "
            "its arguments and the variables that it uses must be picklable. Create what is not inside the "
            "function."
        ) from error
    finally:
        if by_value:
            cloudpickle.unregister_pickle_by_value(module)
    return pickled


def _cloudpickle() -> Any:
    try:
        import cloudpickle
    except ImportError as error:
        raise UsageError("run_ranks needs cloudpickle: pip install 'shardwright[testing]'.") from error
    return cloudpickle


def _innermost(function: Callable[..., Any]) -> Callable[..., Any]:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _name(function: Callable[..., Any]) -> str:
    return getattr(_innermost(function), "__qualname__", repr(function))


def _module_of(function: Callable[..., Any]) -> ModuleType | None:
    function = _innermost(function)
    name = getattr(function, "__module__", None) or type(function).__module__
    return sys.modules.get(name)


def _is_a_script(module: ModuleType) -> bool:
    """Whether a module is neither installed nor part of the interpreter."""
    top = module.__name__.partition(".")[0]
    path = Path(getattr(module, "__file__", None) or "<built in>")
    installed = {"site-packages", "dist-packages"} & set(path.parts)
    return not (installed or top in sys.stdlib_module_names or top in ("shardwright", "__main__"))

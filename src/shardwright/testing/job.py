"""The records that caller, fork server and ranks exchange, and the outcome of one rank."""

import functools
import signal
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from shardwright.comm.codec import declare, decode, encode
from shardwright.comm.joining.run_secret import Seal, packed
from shardwright.comm.message_names import names_a_lost_peer
from shardwright.errors import ShardwrightError, UsageError

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one rank of a call.

    Attributes:
        rank: which one.
        returned: whether the function returned; then `value` is what it returned.
        error: the traceback, if the function raised.
        error_type: the name of the exception's class, for example ``"ValueError"``.
        error_line: the class and the first line of the message.
        exception: the exception itself, if it can be pickled.
        exit_code: 0, what the rank passed to ``sys.exit`` or ``os._exit``, or minus the number of the
            signal that ended it (-9 for SIGKILL).
        seconds: from the rank's start until its function ended or the rank died.
        stopped: ``"timeout"`` or ``"grace"`` if `run_ranks` killed it, because the time was up or
            another had failed.
        was_held: SIGSTOP held it when it was stopped.
        stdout: what it wrote there, its subprocesses included.
        stderr: likewise.
        stacks: its Python stacks, if it was stopped.
    """

    rank: int
    returned: bool
    value: Any = None
    error: str | None = None
    error_type: str | None = None
    error_line: str | None = None
    exception: BaseException | None = field(default=None, repr=False)
    exit_code: int
    seconds: float
    stopped: StopReason | None = None
    was_held: bool = False
    stdout: str = field(default="", repr=False)
    stderr: str = field(default="", repr=False)
    stacks: str = field(default="", repr=False)

    @property
    def ok(self) -> bool:
        """The function returned and the rank ended as it should."""
        return self.returned and (self.exit_code == 0 or self.stopped is not None)

    @property
    def cause(self) -> str:
        """One line on how the rank ended.

        >>> Outcome(rank=0, returned=False, exit_code=-9, seconds=0.5).cause
        'killed by SIGKILL'
        >>> Outcome(rank=0, returned=False, exit_code=0, seconds=0.5).cause
        'exited with code 0 before its function returned'
        """
        if self.ok:
            return "returned"
        if self.error_line is not None:
            return self.error_line
        if self.stopped is not None:
            return "held by SIGSTOP" if self.was_held else "still running"
        if self.exit_code < 0:
            return f"killed by {_signal_name(-self.exit_code)}"
        when = "after" if self.returned else "before"
        return f"exited with code {self.exit_code} {when} its function returned"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals have no name
        return f"signal {number}"


_MAX_OUTPUT_LINES = 60


class RanksFailedError(ShardwrightError, RuntimeError):
    """A rank of `run_ranks` raised, died or did not end.

    Attributes:
        outcomes: what became of every rank, in the order of the ranks.
        first: what became of the rank that failed first.
    """

    def __init__(self, outcomes: Sequence[Outcome], *, timeout_s: float) -> None:
        self.outcomes = tuple(outcomes)
        ordered = first_cause_first(outcomes)
        self.first = ordered[0]
        super().__init__(_message(ordered, num_ranks=len(outcomes), timeout_s=timeout_s))


def first_cause_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Sorts the failed ranks: causes before consequences, then by the time of failure.

    A rank that only lost its connection comes after the rank that closed it, even where it noticed
    before the server saw the other one die; and a rank that was stopped comes last, unless the timeout
    is all that happened.
    """
    failed = [outcome for outcome in outcomes if not outcome.ok]
    return sorted(failed, key=lambda outcome: (_distance_from_cause(outcome), outcome.seconds))


def _distance_from_cause(outcome: Outcome) -> int:
    if outcome.stopped is not None and outcome.error is None:
        # A rank that SIGSTOP holds is why the others wait.
        return 2 if outcome.was_held else 3
    return 1 if is_consequence(outcome) else 0


def is_consequence(outcome: Outcome) -> bool:
    """Says whether a rank failed because another had gone before."""
    return outcome.error is not None and names_a_lost_peer(outcome.error)


def _message(ordered: Sequence[Outcome], *, num_ranks: int, timeout_s: float) -> str:
    return "\n\n".join(
        [_headline(ordered, num_ranks=num_ranks, timeout_s=timeout_s), *map(_section, ordered)]
    )


def _headline(ordered: Sequence[Outcome], *, num_ranks: int, timeout_s: float) -> str:
    first = ordered[0]
    if first.stopped != "timeout":
        return f"rank {first.rank} of {num_ranks} failed first, after {first.seconds:.2f} s: {first.cause}"
    hanging = ", ".join(str(outcome.rank) for outcome in sorted(ordered, key=lambda outcome: outcome.rank))
    return (
        f"{len(ordered)} of {num_ranks} ranks did not end within {timeout_s:g} s: {hanging}. "
        f"Their Python stacks follow. If they only need longer, pass timeout_s={2 * timeout_s:g}."
    )


def _section(outcome: Outcome) -> str:
    why = " (because another rank had gone)" if is_consequence(outcome) else ""
    if outcome.stopped == "grace":
        why = "; stopped, because another rank had failed"
    what = outcome.error_type or outcome.cause
    lines = [f"--- rank {outcome.rank}, {outcome.seconds:.2f} s: {what}{why}"]
    for title, text in (
        ("", outcome.error or ""),
        ("stacks:", outcome.stacks if outcome.stopped == "timeout" else ""),
        ("stdout:", outcome.stdout),
        ("stderr:", outcome.stderr),
    ):
        if text.strip():
            lines += [*([title] if title else []), _tail(text)]
    return "\n".join(lines)


def _tail(text: str) -> str:
    lines = text.rstrip().splitlines()
    if len(lines) <= _MAX_OUTPUT_LINES:
        return "\n".join(lines)
    return "\n".join(
        [f"[{len(lines) - _MAX_OUTPUT_LINES} earlier lines left out]", *lines[-_MAX_OUTPUT_LINES:]]
    )

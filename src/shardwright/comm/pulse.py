"""The pulses of the ranks of a host: each writes into a page of memory that it lives, and the others look.

::

    rank 0    thread ──each 0.5 s──► its page: the time, the step, what the script does, where it is
    rank 1    thread ◄──────────────┘ has the time stood still for 4 s? Then what does the kernel say?

    stopped by a signal    nobody but the sender can wake it: who waits for it ends the run, and it
    held by a debugger     nothing is said
    neither                C code holds the interpreter, or the host is too busy: it is named, and waited for

The page of a rank is in memory that has no name: nothing is left of it, however the rank ends. Others open it
by the process and the descriptor, which ranks tell each other when they join.
"""

import faulthandler
import mmap
import os
import signal
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

_EACH_S = 0.5
_LIMIT_S = 3.5
"""Without a beat, after which a rank is named."""
_REGULAR_S = 1.5
"""Between two looks of this rank: after longer ones it has itself been held up, and begins anew."""
_DUMP_S = 0.3

# Which rank, its process, whether it waits for others, the time of its last beat; then what it does.
_HEAD = struct.Struct("=qq?dI")
_PAGE = mmap.PAGESIZE
_MOST = _PAGE - _HEAD.size
_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


class PageAddress(NamedTuple):
    """Where the page of a rank is.

    Attributes:
        host: of the process, the same for all processes that see each other; empty: it has no page.
        process: its number there.
        page: the descriptor of its page.
        stack: the descriptor of the file into which it writes its stack when it is asked; -1: it does not.
    """

    host: str
    process: int
    page: int
    stack: int


class Beat(NamedTuple):
    """What is on a page."""

    rank: int
    process: int
    waits: bool
    at_s: float
    does: str
    stack: str


class Doing(NamedTuple):
    """What a rank does: whether it waits for others, in a line, and its innermost functions."""

    waits: bool
    does: str
    stack: str


class Pulse:
    """The page of this rank, and the thread that writes it; the thread waits for nothing.

    Attributes:
        address: where others find it.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._page: mmap.mmap | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.address = PageAddress("", 0, 0, 0)
        host = _host()
        if not host:
            return  # not Linux: ranks are watched by the store alone
        with suppress(OSError, AttributeError):  # neither may a kernel have memory without a name
            page = os.memfd_create("shardwright-pulse")
            os.ftruncate(page, _PAGE)
            self._page = mmap.mmap(page, _PAGE)
            self.address = PageAddress(host, os.getpid(), page, _stack_file())
            self.beat(waits=False)

    def begin(self, doing: Callable[[], Doing], look: Callable[[bool], None]) -> None:
        """Beats from now on, and looks at the others; `look` gets whether this rank waits for some."""

        def run() -> None:
            while not self._ended.wait(_EACH_S):
                waits, does, stack = doing()
                self.beat(waits=waits, does=does, stack=stack)
                look(waits)

        if self._page is not None:
            self._thread = threading.Thread(target=run, name="shardwright-pulse", daemon=True)
            self._thread.start()

    def beat(self, *, waits: bool, does: str = "", stack: str = "", at_s: float | None = None) -> None:
        """Says that this rank lives, and what it does, in a line."""
        if self._page is not None:
            text = f"{does}\n{stack}".encode(errors="replace")[:_MOST]
            head = (self._rank, os.getpid(), waits, time.monotonic() if at_s is None else at_s, len(text))
            self._page[: _HEAD.size + len(text)] = _HEAD.pack(*head) + text

    def rest(self) -> None:
        """Says that no more beats come, as this rank has ended, and gives the page back."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _EACH_S)
        if self._page is not None:
            self.beat(waits=False, at_s=float("inf"))
            self._page = None
            os.close(self.address.page)

    def others(self, addresses: Iterable[PageAddress]) -> dict[int, "OtherPage"]:
        """The pages of the other ranks of this host, by rank."""
        found = {}
        for rank, address in enumerate(addresses):
            if rank != self._rank and address.host and address.host == self.address.host:
                with suppress(OSError, ValueError):  # it has just ended, or does not let others look
                    found[rank] = OtherPage(rank, address)
        return found


class OtherPage:
    """The page of another rank of this host."""

    def __init__(self, rank: int, address: PageAddress):
        self._address = address
        # Signals go to that process, and never to a later one of its number.
        self._process = _Process(address.process)
        with open(f"/proc/{address.process}/fd/{address.page}", "rb") as file:
            self._page = mmap.mmap(file.fileno(), _PAGE, prot=mmap.PROT_READ)
        beat = self.read()
        if (beat.rank, beat.process) != (rank, address.process):
            raise ValueError("the page of another process")

    def read(self) -> Beat:
        """What is on it."""
        rank, process, waits, at_s, size = _HEAD.unpack(self._page[: _HEAD.size])
        text = self._page[_HEAD.size : _HEAD.size + min(size, _MOST)].decode(errors="replace")
        does, _, stack = text.partition("\n")
        return Beat(rank, process, waits, at_s, does, stack)

    def state(self) -> str:
        """What the kernel says of the process: a letter as in ``ps``; empty where it has ended."""
        try:
            stat = Path(f"/proc/{self._address.process}/stat").read_text(errors="replace")
        except OSError:
            return ""
        return stat.rpartition(")")[2].split()[0]

    def stack(self) -> str:
        """Its stack, which C code writes, although Python does not run; empty where that does not come."""
        if self._address.stack < 0 or _SIGNAL is None:
            return ""
        file = Path(f"/proc/{self._address.process}/fd/{self._address.stack}")
        with suppress(OSError):
            before = file.stat().st_size
            self._process.signal(_SIGNAL)
            time.sleep(_DUMP_S)
            return file.read_bytes()[before:].decode(errors="replace").strip()
        return ""

    def end(self) -> None:
        """Ends the process, which is stopped, so that all that wait for it notice."""
        with suppress(OSError):
            self._process.signal(signal.SIGKILL)


class _Process:
    """Another process, by what stays its own."""

    def __init__(self, number: int):
        self._descriptor = os.pidfd_open(number)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def signal(self, number: int) -> None:
        """Sends a signal."""
        signal.pidfd_send_signal(self._descriptor, number)


@cache
def _stack_file() -> int:
    """The file into which C code writes the stack when it is asked; -1 where it does not.

    It stays as long as the process: a signal that nobody waits for would end it.
    """
    if _SIGNAL is None or signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return -1
    file = os.memfd_create("stack-of-a-rank")
    faulthandler.register(_SIGNAL, file=file, all_threads=False)
    return file


@dataclass(slots=True)
class Pulses:
    """What this rank finds out about the others of its host, from the outside.

    Attributes:
        pages: of the others.
        tell: gets a text for people.
    """

    rank: int
    pages: Mapping[int, OtherPage]
    tell: Callable[[str], None]
    _looked_s: float = 0.0
    _regular_since_s: float = 0.0
    _told: dict[int, float] = field(default_factory=dict)
    _stopped: dict[int, float] = field(default_factory=dict)

    def look(self, *, waits: bool) -> tuple[int, str] | None:
        """The rank that will never go on, and why, if this rank is to end the run for it."""
        now_s = time.monotonic()
        if now_s - self._looked_s > _REGULAR_S:
            self._regular_since_s = now_s
        self._looked_s = now_s
        if now_s - self._regular_since_s < _LIMIT_S:
            return None
        beats = {rank: page.read() for rank, page in self.pages.items()}
        silent = {rank: beat for rank, beat in beats.items() if now_s - beat.at_s > _LIMIT_S}
        waiting = [rank for rank, beat in beats.items() if beat.waits and rank not in silent]
        if not silent or not waits or min([*waiting, self.rank]) != self.rank:
            return None  # another one speaks, or nobody waits
        before, self._stopped = self._stopped, {}
        for rank, beat in silent.items():
            state = self.pages[rank].state()
            if state == "T":
                self._stopped[rank] = beat.at_s
            elif state in ("R", "S", "D") and self._told.get(rank) != beat.at_s:
                self._told[rank] = beat.at_s
                self.tell(self._of_silent(rank, beat, now_s))
                self._looked_s = time.monotonic()
                return None  # the next one at the next look: this one has taken a moment
        for rank, at_s in self._stopped.items():
            if before.get(rank) == at_s:  # twice, and no beat between
                self.tell(f"the stack of rank {rank}, when it was seen last:\n{silent[rank].stack}")
                return rank, self._of_stopped(rank, silent[rank], now_s, waiting)
        return None

    def _of_stopped(self, rank: int, beat: Beat, now_s: float, waiting: Iterable[int]) -> str:
        who = sorted([self.rank, *waiting])
        they_wait = f"ranks {', '.join(map(str, who))} wait" if len(who) > 1 else f"rank {who[0]} waits"
        return (
            f"rank {rank} hangs: a signal (SIGSTOP, or the terminal's) has stopped its process "
            f"{beat.process} for {now_s - beat.at_s:.0f} s, and {they_wait}. It was {beat.does}."
        )

    def _of_silent(self, rank: int, beat: Beat, now_s: float) -> str:
        page = self.pages[rank]
        stack = page.stack() if page.read().at_s == beat.at_s else ""
        return (
            f"rank {rank} has not run Python for {now_s - beat.at_s:.0f} s: C code holds the interpreter "
            f"(the GIL) there, or the host is too busy; rank {self.rank} waits. It was {beat.does}. "
            f"Its stack:\n{stack or beat.stack}"
        )


def _host() -> str:
    """The same for processes that see each other under /proc."""
    if sys.platform != "linux":
        return ""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""

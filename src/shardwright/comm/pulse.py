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
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

_LIMIT_S = 4.0
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
        stack: the descriptor of the file into which it writes its stack when it is asked.
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


class Pulse:
    """The page of this rank.

    Attributes:
        address: where others find it.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._page: mmap.mmap | None = None
        self.address = PageAddress("", 0, 0, 0)
        host = _host()
        if not host or not hasattr(os, "memfd_create"):
            return  # not Linux: ranks are watched by the store alone
        page, stack = (os.memfd_create(f"shardwright-{name}") for name in ("pulse", "stack"))
        os.ftruncate(page, _PAGE)
        self._page = mmap.mmap(page, _PAGE)
        self.address = PageAddress(host, os.getpid(), page, stack)
        self.beat(waits=False)
        if _SIGNAL is not None and signal.getsignal(_SIGNAL) is signal.SIG_DFL:
            faulthandler.register(_SIGNAL, file=stack, all_threads=False)

    def beat(self, *, waits: bool, does: str = "", stack: str = "", at_s: float | None = None) -> None:
        """Says that this rank lives, and what it does, in a line."""
        if self._page is not None:
            text = f"{does}\n{stack}".encode(errors="replace")[:_MOST]
            head = (self._rank, os.getpid(), waits, time.monotonic() if at_s is None else at_s, len(text))
            self._page[: _HEAD.size + len(text)] = _HEAD.pack(*head) + text

    def rest(self) -> None:
        """Says that no more beats come, as this rank has ended, and gives the page back."""
        if self._page is None:
            return
        self.beat(waits=False, at_s=float("inf"))
        self._page = None
        if _SIGNAL is not None:
            faulthandler.unregister(_SIGNAL)
        for descriptor in (self.address.page, self.address.stack):
            os.close(descriptor)

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
        file = Path(f"/proc/{self._address.process}/fd/{self._address.stack}")
        try:
            before = file.stat().st_size
            os.kill(self._address.process, signal.Signals.SIGCONT if _SIGNAL is None else _SIGNAL)
            time.sleep(_DUMP_S)
            return file.read_bytes()[before:].decode(errors="replace").strip()
        except OSError:
            return ""

    def end(self) -> None:
        """Ends the process, which is stopped, so that all that wait for it notice."""
        with suppress(ProcessLookupError):
            os.kill(self._address.process, signal.SIGKILL)


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
        for rank, beat in silent.items():
            state = self.pages[rank].state()
            if state == "T":
                self.tell(f"the stack of rank {rank}, when it was seen last:\n{beat.stack}")
                return rank, self._of_stopped(rank, beat, now_s, waiting)
            if state in ("R", "S", "D") and self._told.get(rank) != beat.at_s:
                self._told[rank] = beat.at_s
                self.tell(self._of_silent(rank, beat, now_s))
        return None

    def _of_stopped(self, rank: int, beat: Beat, now_s: float, waiting: Iterable[int]) -> str:
        who = sorted([self.rank, *waiting])
        return (
            f"rank {rank} hangs: a signal (SIGSTOP) has stopped its process {beat.process} for "
            f"{now_s - beat.at_s:.0f} s, and rank{'s' * (len(who) > 1)} {', '.join(map(str, who))} "
            f"wait{'s' * (len(who) == 1)} for it. It was {beat.does}."
        )

    def _of_silent(self, rank: int, beat: Beat, now_s: float) -> str:
        stack = self.pages[rank].stack()
        return (
            f"rank {rank} has not run Python for {now_s - beat.at_s:.0f} s: C code holds the interpreter "
            f"(the GIL) there, or the host is too busy; rank {self.rank} waits for it. It was {beat.does}. "
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

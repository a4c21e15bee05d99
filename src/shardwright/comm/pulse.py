"""The pulses of the ranks of a host: each writes into a page of memory that it lives, and the others look.

::

    rank 0    thread ──each 0.5 s──► its page: the time, the step, what the script does, where it is
    rank 1    thread ◄──────────────┘ has the time stood still for 4 s? Then what does the kernel say?

    stopped by a signal    nobody but the sender can wake it: who waits for it ends the run, and it
    held by a debugger     nothing is said
    neither                C code holds the interpreter, or the host is too busy: it is named, and waited for

The page of a rank is in memory that has no name, or in a file of its launcher, which reads it when the rank
has ended. Others open it by the process and the descriptor, which ranks tell each other when they join. What
is on it: see `flight_record`.
"""

import faulthandler
import mmap
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

from shardwright.comm._private import recorded_collectives
from shardwright.files import replace_file
from shardwright.flight_record import (
    FOLDER,
    PAGE_BYTES,
    PAGE_VARIABLE,
    Beat,
    Page,
    keep,
    open_kept,
    read_beat,
    space_of_processes,
    state_of,
)

_EACH_S = 0.5
_LIMIT_S = 3.5
"""Without a beat, after which a rank is named."""
_REGULAR_S = 1.5
"""Between two looks of this rank: after longer ones it has itself been held up, and begins anew."""
_DUMP_S = 0.3
_LEAVING_S = 1.0
_HELD_UP_S = 1.0

_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else None


class PageAddress(NamedTuple):
    """Where the page of a rank is.

    Attributes:
        host: of the process, the same for all processes that see each other; empty: it has no page.
        stack: the descriptor of the file into which it writes its stack when it is asked; -1: it does not.
    """

    host: str
    process: int
    page: int
    stack: int


class Doing(NamedTuple):
    """What a rank does: whether it waits, in a line, its innermost functions, and the ranks it waits for."""

    waits: bool
    does: str
    stack: str
    waits_for: tuple[int, ...] = ()


class Pulse:
    """The page of this rank, and the thread that writes it; the thread waits for nothing.

    Attributes:
        held_up_s: for how long, so far, the process could not run Python for more than a second.
    """

    def __init__(self, rank: int):
        self._rank = rank
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._kept = -1
        self._kept_in: Path | None = None
        self._file, memory = _memory_of_page()
        self.page = Page(memory, rank)
        self.held_up_s = 0.0
        host = space_of_processes()
        self.address = PageAddress("", 0, 0, 0)
        if host and self._file >= 0:  # else ranks are watched by the store alone
            self.address = PageAddress(host, os.getpid(), self._file, _stack_file())
        self.page.beat(waits=False)

    def begin(self, doing: Callable[[], Doing], look: Callable[[bool], None] = lambda waits: None) -> None:
        """Beats from now on, and looks at the others; `look` gets whether this rank waits for some."""

        def run() -> None:
            before_s = time.monotonic()
            while not self._ended.wait(_EACH_S):
                late_s = time.monotonic() - before_s - _EACH_S
                self.held_up_s += late_s if late_s > _HELD_UP_S else 0.0
                waits, does, stack, waits_for = doing()
                self.page.beat(waits=waits, does=does, stack=stack, waits_for=waits_for)
                self._keep()
                look(waits)
                before_s = time.monotonic()

        self._thread = threading.Thread(target=run, name="shardwright-pulse", daemon=True)
        self._thread.start()

    def keep_in(self, folder: Path, *, world_size: int) -> None:
        """Copies the page into a run folder from now on; that of a life before is kept beside it.

        The first rank removes those of ranks that there are no more.
        """
        with suppress(OSError):  # no such folder, on this host
            for path in (folder / FOLDER).glob("rank*") if self._rank == 0 else ():
                number = path.name.removeprefix("rank")
                if number.isdecimal() and int(number) >= world_size:
                    path.unlink()
            kept = open_kept(folder, self._rank)
            if os.fstat(kept).st_size:
                os.close(kept)
                path = folder / FOLDER / f"rank{self._rank}"
                path.replace(f"{path}.before")
                kept = open_kept(folder, self._rank)
            self._kept, self._kept_in = kept, folder
        self._keep()

    def _keep(self) -> None:
        if self._kept >= 0:
            with suppress(OSError):  # the disk is full, or far away
                os.pwrite(self._kept, self.page.content(), 0)

    def keep_of_failure(self, others: Mapping[int, "OtherPage"]) -> None:
        """Leaves the pages of ranks that were killed, and what PyTorch has recorded; this rank fails.

        It waits only briefly for the disk, which may hang: the rank is to end.
        """
        if self._kept_in is not None:
            leaving = threading.Thread(target=self._leave_records, args=(self._kept_in, others), daemon=True)
            leaving.start()
            leaving.join(_LEAVING_S)

    def _leave_records(self, folder: Path, others: Mapping[int, "OtherPage"]) -> None:
        for rank, page in others.items():
            if page.has_ended() and page.read().at_s < float("inf"):
                keep(folder, rank, page.content())
        if found := recorded_collectives():
            with suppress(OSError):
                replace_file(folder / FOLDER / f"rank{self._rank}.collectives.json", found, follows=False)

    def rest(self, why: str = "") -> None:
        """Says that no more beats come, as this rank has ended, and gives the page back."""
        self._ended.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(2 * _EACH_S)
        if self._file >= 0 or self._kept >= 0:
            self.page.beat(waits=False, does=why, at_s=float("inf"))
            self._keep()
        for descriptor in (self._file, self._kept):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._kept = -1

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
            self._page = mmap.mmap(file.fileno(), PAGE_BYTES, prot=mmap.PROT_READ)
        beat = self.read()
        if (beat.rank, beat.process) != (rank, address.process):
            raise ValueError("the page of another process")

    def read(self) -> Beat:
        beat = read_beat(self._page)
        if beat is None:
            raise ValueError("no page of a rank")
        return beat

    def content(self) -> bytes:
        """All of it, also once the process has ended."""
        return self._page[:]

    def state(self) -> str:
        """What the kernel says of the process: a letter as in ``ps``; empty where it has ended."""
        return state_of(self._address.process)

    def has_ended(self) -> bool:
        """Whether the process has ended."""
        look = select.poll()  # which takes descriptors of any number
        look.register(self._process, select.POLLIN)
        return bool(look.poll(0))

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

    def fileno(self) -> int:
        """A descriptor that can be read when it has ended."""
        return self._descriptor

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
    """What this rank finds out about the others of its host, from the outside."""

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
            f"{beat.process} for {now_s - beat.at_s:.0f} s, and {they_wait}.{_was(beat)}"
        )

    def _of_silent(self, rank: int, beat: Beat, now_s: float) -> str:
        page = self.pages[rank]
        stack = page.stack() if page.read().at_s == beat.at_s else ""
        return (
            f"rank {rank} has not run Python for {now_s - beat.at_s:.0f} s: C code holds the interpreter "
            f"(the GIL) there, or the host is too busy; rank {self.rank} waits.{_was(beat)} "
            f"Its stack:\n{stack or beat.stack}"
        )


def _was(beat: Beat) -> str:
    return f" It was {beat.does}." if beat.does else ""


_given_file = ""


def _memory_of_page() -> tuple[int, mmap.mmap]:
    """Memory for a page, and its descriptor: the launcher's file, or none; -1: nobody else can see it."""
    global _given_file
    # What the script starts is no rank.
    _given_file = os.environ.pop(PAGE_VARIABLE, "") or _given_file
    for given in (_given_file, ""):
        with suppress(OSError, AttributeError):  # no room; or the kernel has no memory without a name
            file = (
                os.open(given, os.O_RDWR | os.O_CREAT, 0o600)
                if given
                else os.memfd_create("shardwright-pulse")
            )
            try:
                os.posix_fallocate(file, 0, PAGE_BYTES)  # a page without room would end this process
                return file, mmap.mmap(file, PAGE_BYTES)
            except BaseException:
                os.close(file)
                raise
    return -1, mmap.mmap(-1, PAGE_BYTES)

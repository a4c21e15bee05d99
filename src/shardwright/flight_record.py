"""The page on which a rank notes what it does, for others to read: also once it has been killed.

::

    0     head       how the thread of the pulse found the rank, twice a second
    96    progress   steps, seconds, memory: the script, when a step ends
    160   actions    the last 64, with begin, end and waiting: the script, at each of them
    2208  text       what the rank does, whom it waits for, its stack: the thread of the pulse

The page is memory that another process has, too: the launcher, or ranks of the same host. The thread copies
it into the run folder, ``ranks/rank0``; when the rank has ended, the launcher does. No step touches the disk
of the run folder, which may be full or far away.
"""

import os
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from mmap import mmap
from pathlib import Path
from typing import NamedTuple

PAGE_BYTES = 8192
PAGE_VARIABLE = "SHARDWRIGHT_PROGRESS"
"""Names the file in which the launcher finds the page of a rank, however that ends."""
FOLDER = "ranks"
"""Of the pages, in a run folder."""
_MAGIC = b"SWr1"

# Rank, process, when that began (ticks of the kernel), whether it waits, two clocks at the last beat; the
# length of the text.
_HEAD = struct.Struct("=4sqqq?ddI")
# Steps, whether the state is saved and the script only has to end, seconds of the last step, peak of memory.
_PROGRESS = struct.Struct("=q?dq")
_PROGRESS_AT, _ACTIONS_AT, _TEXT_AT = 96, 160, 2208
_CELLS, _KEPT = 4, 64
_MOST_TEXT = PAGE_BYTES - _TEXT_AT
LAST_ACTIONS = 50

_STEP_ENDS = 1 << 50
_STAGES, _MICROBATCHES = 1 << 16, 1 << 20


class Beat(NamedTuple):
    """How the thread of the pulse found a rank.

    Attributes:
        at_s: on `time.monotonic`; infinity: the rank has ended.
        host: of its process; `space` is the same for processes that see each other.
    """

    rank: int
    process: int
    waits: bool
    at_s: float
    does: str
    stack: str
    waits_for: tuple[int, ...] = ()
    host: str = ""
    space: str = ""
    wall_s: float = 0.0
    begun: int = 0


class NotedAction(NamedTuple):
    """An action, as a rank has noted it.

    Attributes:
        kind: the number of its `Kind`; -1: a step ended here.
        microbatch: or the number of the step that ended.
        end_s: 0 where it goes on, or where nobody looks when it ends, as with messages.
    """

    kind: int
    stage: int
    microbatch: int
    start_s: float
    end_s: float
    waited_s: float


@dataclass(frozen=True, slots=True)
class RankRecord:
    """What is on a page."""

    beat: Beat
    steps: int
    step_s: float
    memory_bytes: int
    actions: tuple[NotedAction, ...]


class Page:
    """The page of this process.

    Attributes:
        cells: the ring of actions: code, start, end, waiting of each.
    """

    def __init__(self, memory: mmap, rank: int) -> None:
        self._memory = memory
        self._rank = rank
        self._process, self._begun = os.getpid(), _began(os.getpid())
        self._who = f"{socket.gethostname()}\n{space_of_processes()}"
        self.cells = memoryview(memory)[_ACTIONS_AT:_TEXT_AT].cast("d")

    def beat(
        self,
        *,
        waits: bool,
        does: str = "",
        stack: str = "",
        waits_for: Sequence[int] = (),
        at_s: float | None = None,
    ) -> None:
        named = " ".join(map(str, waits_for))
        text = "\n".join((self._who, named, does, stack))
        written = text.encode(errors="replace")[:_MOST_TEXT]
        head = _HEAD.pack(
            *(_MAGIC, self._rank, self._process, self._begun, waits),
            *(time.monotonic() if at_s is None else at_s, time.time(), len(written)),
        )
        self._memory[_TEXT_AT : _TEXT_AT + len(written)] = written
        self._memory[: len(head)] = head

    def progress(self, steps: int, *, has_saved: bool, step_s: float = 0.0, memory_bytes: int = 0) -> None:
        _PROGRESS.pack_into(self._memory, _PROGRESS_AT, steps, has_saved, step_s, memory_bytes)

    def content(self) -> bytes:
        return self._memory[:]


def new_ring() -> "memoryview[float]":
    """A ring of actions for nobody."""
    return memoryview(bytearray(_KEPT * _CELLS * 8)).cast("d")


NEXT = tuple((at + _CELLS) % (_KEPT * _CELLS) for at in range(_KEPT * _CELLS))
"""Where in the ring the next action goes."""


def code_of(kind: int, stage: int, microbatch: int) -> float:
    """An action as a number, which is never 0."""
    return float(
        (kind + 1) * _STAGES * _MICROBATCHES + stage % _STAGES * _MICROBATCHES + microbatch % _MICROBATCHES
    )


def code_of_end(step: int) -> float:
    """The end of a step, as an action."""
    return float(_STEP_ENDS + step)


def read_page(content: bytes) -> RankRecord | None:
    """What is on a page; None where it is none, or none yet."""
    beat = read_beat(content)
    if beat is None:
        return None
    steps, _, step_s, memory_bytes = _PROGRESS.unpack_from(content, _PROGRESS_AT)
    noted = sorted(_actions(content), key=lambda action: action.start_s)
    return RankRecord(beat, steps, step_s, memory_bytes, tuple(noted[-LAST_ACTIONS:]))


def read_progress(content: bytes) -> tuple[int, bool]:
    """The steps that a rank has made, and whether it has saved its state and only has to end."""
    steps, has_saved, *_ = _PROGRESS.unpack_from(content, _PROGRESS_AT)
    return steps, has_saved


def read_beat(content: bytes | mmap) -> Beat | None:
    if len(content) < PAGE_BYTES or content[: len(_MAGIC)] != _MAGIC:
        return None
    _, rank, process, begun, waits, at_s, wall_s, size = _HEAD.unpack(content[: _HEAD.size])
    text = content[_TEXT_AT : _TEXT_AT + min(size, _MOST_TEXT)].decode(errors="replace")
    host, space, named, does, stack = (*text.split("\n", 4), "", "", "", "", "")[:5]
    waits_for = tuple(int(each) for each in named.split() if each.isdecimal())
    return Beat(rank, process, waits, at_s, does, stack, waits_for, host, space, wall_s, begun)


def _actions(content: bytes) -> Iterator[NotedAction]:
    cells = memoryview(content[_ACTIONS_AT:_TEXT_AT]).cast("d")
    for at in range(0, len(cells), _CELLS):
        code, start_s, end_s, waited_s = cells[at : at + _CELLS]
        if not 0 < code < 2 * _STEP_ENDS:  # empty; or the page is damaged
            continue
        number = int(code)
        if number >= _STEP_ENDS:
            yield NotedAction(-1, 0, number - _STEP_ENDS, start_s, end_s, waited_s)
        else:
            kind, rest = divmod(number, _STAGES * _MICROBATCHES)
            yield NotedAction(kind - 1, *divmod(rest, _MICROBATCHES), start_s, end_s, waited_s)


def keep(folder: Path, rank: int, content: bytes) -> None:
    """Leaves a page in a run folder; where that cannot be, nothing is said: the run goes on."""
    with suppress(OSError), open(open_kept(folder, rank), "r+b") as file:
        file.write(content)


def open_kept(folder: Path, rank: int) -> int:
    """The file of a rank's page in a run folder."""
    inside = folder / FOLDER
    inside.mkdir(exist_ok=True)
    return os.open(inside / f"rank{rank}", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)


def state_of(process: int) -> str:
    """What the kernel says of a process: a letter as in ``ps``; empty where it has ended."""
    return stat_of(process)[:1]


def is_the_same(beat: Beat) -> bool:
    """Whether the process that wrote a page is still there, and no later one of its number."""
    return bool(state_of(beat.process)) and beat.begun in (0, _began(beat.process))


def _began(process: int) -> int:
    """When a process began, in ticks of the kernel; 0 where that is not known."""
    fields = stat_of(process).split()
    return int(fields[19]) if len(fields) > 19 else 0


def stat_of(process: int) -> str:
    """What the kernel tells of a process, from its state on."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")
    except OSError:
        return ""
    return stat.rpartition(")")[2].strip()


def space_of_processes() -> str:
    """The same for processes that see each other under /proc; empty where there is no such place."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""

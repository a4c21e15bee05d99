"""What the ranks of a run do now, or did last: read from the pages that they leave in the run folder.

::

    rank  host  pid   state    step  does                             since   waits for  last step  memory
    0     n1    4242  waits    57    backward of microbatch 1, ...    31 s    1          410 ms     3.1 GiB
    1     n1    4243  stopped  57    forward of microbatch 2, ...     31 s               410 ms     3.1 GiB
    rank 1 holds up the others: a signal has stopped it
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwright.comm.message_names import listed
from shardwright.errors import UsageError
from shardwright.flight_record import (
    FOLDER,
    PAGE_BYTES,
    Beat,
    NotedAction,
    RankRecord,
    is_the_same,
    read_page,
    space_of_processes,
    state_of,
)
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.observe.run_record import read_record
from shardwright.quantities import format_bytes, format_seconds
from shardwright.schedule import Kind
from shardwright.text import align, cut

_SILENT_S = 3.5
_SILENT_ELSEWHERE_S = 90.0  # a shared folder may show a page a minute late, and clocks differ
"""On another host: its clock may differ, and a shared folder shows late what was written."""
_LONG_S = 2.0
_WIDEST = 90
_KINDS = tuple(Kind)
_STATES = {
    "stopped": "a signal has stopped it",
    "gone": "its process has ended without a word",
    "silent": "it has run no Python for {since}",
}


@dataclass(frozen=True, slots=True)
class RankStatus:
    """What a rank does, or did last.

    Attributes:
        state: works, waits; stopped, by a signal; silent: no Python runs; ended; gone, without a word.
        since_s: since when it has been at the last action; None where it is at none any more.
    """

    record: RankRecord
    state: str
    since_s: float | None

    @property
    def rank(self) -> int:
        return self.record.beat.rank

    @property
    def step(self) -> int:
        """The step that it makes, or made last."""
        return self.record.steps + (self.state not in ("ended", "gone") or not self._is_between)

    @property
    def does(self) -> str:
        beat = self.record.beat
        if self.state == "ended":
            return beat.does or "has ended"
        if not self._is_between:
            line = beat.does.rpartition(", at ")[2] if ", at " in beat.does else ""
            return ", ".join(filter(None, (told(self.record.actions[-1]), _short(line))))
        step, _, rest = beat.does.partition(", ")
        return ", ".join(filter(None, ("after the step" if step.startswith("after") else "", _short(rest))))

    def to_document(self) -> dict[str, Any]:
        beat, record = self.record.beat, self.record
        last_s = record.actions[-1].start_s if record.actions else 0.0
        return {
            "rank": beat.rank,
            "host": beat.host,
            "process": beat.process,
            "state": self.state,
            "step": self.step,
            "does": self.does,
            "since_s": self.since_s,
            "waits_for": list(beat.waits_for),
            "last_step_s": record.step_s or None,
            "memory_bytes": record.memory_bytes or None,
            "stack": beat.stack.splitlines(),
            "actions": [_action_document(action, last_s) for action in record.actions],
        }

    @property
    def _is_between(self) -> bool:
        actions = self.record.actions
        return not actions or actions[-1].kind < 0


def read_statuses(folder: RunFolder) -> tuple[RankStatus, ...]:
    """Of all ranks whose pages are in a run folder, and of the present run in it."""
    record = read_record(folder)
    begun_s = 0.0 if record is None else record.begun_s
    found = [page for path in (folder.path / FOLDER).glob("rank*") if (page := _page(path)) is not None]
    now = [_status(page) for page in found if page.beat.wall_s >= begun_s]
    if not now:
        raise UsageError(
            f"no rank has left word in {show_path(folder.path)}/{FOLDER}: a run does once it makes its first "
            "step. If it runs on another host, look there, or in a folder that the hosts share."
        )
    return tuple(sorted(now, key=lambda status: status.rank))


def _page(path: Path) -> RankRecord | None:
    if not path.name.removeprefix("rank").isdecimal() or not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            return read_page(file.read(PAGE_BYTES))
    except OSError:
        return None


def _status(record: RankRecord) -> RankStatus:
    beat = record.beat
    if math.isinf(beat.at_s):
        return RankStatus(record, "ended", None)
    is_here = bool(beat.space) and beat.space == space_of_processes()
    quiet_s = time.monotonic() - beat.at_s if is_here else time.time() - beat.wall_s
    state = _state(beat, quiet_s, is_here=is_here)
    last_s = record.actions[-1].start_s if record.actions else beat.at_s
    since_s = None if state == "gone" else max(0.0, beat.at_s - last_s + quiet_s)
    return RankStatus(record, state, since_s)


def _state(beat: Beat, quiet_s: float, *, is_here: bool) -> str:
    if is_here and (not is_the_same(beat) or state_of(beat.process) == "Z"):
        return "gone"
    if is_here and state_of(beat.process) == "T":
        return "stopped"
    if quiet_s > (_SILENT_S if is_here else _SILENT_ELSEWHERE_S):
        return "silent"
    return "waits" if beat.waits else "works"


def told(action: NotedAction) -> str:
    """An action, for people."""
    if action.kind < 0:
        return f"step {action.microbatch} ended"
    name = _KINDS[action.kind].name.lower() if action.kind < len(_KINDS) else "?"
    return f"{name} of microbatch {action.microbatch} on stage {action.stage}"


def _action_document(action: NotedAction, last_s: float) -> dict[str, Any]:
    return {
        "action": told(action),
        "before_last_s": round(last_s - action.start_s, 6),
        "seconds": round(action.end_s - action.start_s, 6) if action.end_s else None,
        "waited_s": round(action.waited_s, 6) if action.end_s else None,
    }


def format_statuses(statuses: Sequence[RankStatus]) -> str:
    """A table, and who holds up the others."""
    header = ["rank", "host", "pid", "state", "step", "does", "since", "waits for", "last step", "memory"]
    rows = [header]
    for status in statuses:
        beat, record = status.record.beat, status.record
        since = "" if status.since_s is None else format_seconds(status.since_s)
        rows.append(
            [
                *(str(beat.rank), beat.host, str(beat.process), status.state, str(status.step)),
                *(
                    cut(status.does, _WIDEST),
                    since,
                    listed(beat.waits_for) if status.state == "waits" else "",
                ),
                format_seconds(record.step_s) if record.step_s else "-",
                format_bytes(record.memory_bytes) if record.memory_bytes else "-",
            ]
        )
    return "\n".join([align(rows), *held_up(statuses)])


def held_up(statuses: Sequence[RankStatus]) -> list[str]:
    """Who keeps others waiting for long, a line each; nothing while all get on."""
    by_rank = {status.rank: status for status in statuses}
    waiting = [s for s in statuses if s.state == "waits" and (s.since_s or 0.0) > _LONG_S]
    lines = []
    for status in statuses:
        if (reason := _STATES.get(status.state)) and (waiting or status.state != "gone"):
            since = "" if status.since_s is None else format_seconds(status.since_s)
            lines.append(f"rank {status.rank} holds up the others: {reason.format(since=since)}")
    if lines or not waiting:
        return lines
    roots = sorted({root for status in waiting for root in _roots(status, by_rank)})
    if not roots:
        chain = "; ".join(f"rank {s.rank} for {listed(s.record.beat.waits_for)}" for s in waiting)
        return [f"ranks wait for each other: {chain}"]
    names = listed(tuple(status.rank for status in waiting))
    return [f"rank {root} keeps {names} waiting: {by_rank[root].does}" for root in roots]


def _roots(status: RankStatus, by_rank: Mapping[int, RankStatus]) -> set[int]:
    """The ranks at the ends of the chains of waiting that begin at one."""
    seen: set[int] = set()
    found: set[int] = set()
    pending = [status.rank]
    while pending:
        rank = pending.pop()
        if rank in seen or rank not in by_rank:
            continue
        seen.add(rank)
        if by_rank[rank].state == "waits":
            pending += by_rank[rank].record.beat.waits_for
        else:
            found.add(rank)
    return found


def format_actions(status: RankStatus) -> str:
    """The last actions of a rank: seconds before the last one, those it took, and those it waited."""
    actions = status.record.actions
    if not actions:
        return f"rank {status.rank} has noted no action yet"
    rows = [["before", "action", "took", "waited"]]
    for action in actions:
        took = format_seconds(action.end_s - action.start_s) if action.end_s else ""
        waited = format_seconds(action.waited_s) if action.end_s and action.waited_s else ""
        before = f"{actions[-1].start_s - action.start_s:.3f} s"
        rows.append([before, told(action), took, waited])
    stack = status.record.beat.stack
    return "\n".join([align(rows), *(["its stack, as it was seen last", stack] if stack else [])])


def _short(text: str) -> str:
    """A line of the script without the folders around it."""
    start, at, line = text.rpartition("at ")
    return f"{start}{at}{Path(line).name}" if "/" in line else text

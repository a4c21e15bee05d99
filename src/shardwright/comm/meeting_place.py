"""Where a rank is: the functions on its stack, how long it stands there, and its joint calls."""

import json
import struct
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.comm._private import counts_messages, group_named, number_of_collectives
from shardwright.comm.message_names import digest, ranks_in, spans

_OURS = ("torch.", "shardwright.", "smdistributed.", "contextlib", "threading")
# Functions that no rank leaves before all of the group have called them.
_JOINT = frozenset(
    "all_gather all_gather_into_tensor all_gather_object all_gather_single all_reduce all_to_all "
    "all_to_all_single barrier monitored_barrier reduce_scatter reduce_scatter_single "
    "reduce_scatter_tensor".split()
)
_MODULE = "torch.distributed.distributed_c10d"
# Functions of these wait for other ranks; what they call waits for them.
_WAITING = (
    "shardwright.comm.",
    "shardwright.torch.replicas.",
    "shardwright.torch.sharding.",
    "shardwright.torch.script_collectives",
    "shardwright.torch.step_end.",
    "torch.distributed.distributed_c10d",
    "torch.distributed.c10d_logger",
)
_HELPERS = ("threading", "selectors", "queue", "contextlib", "torch.futures")


@dataclass(frozen=True, slots=True)
class JointCall:
    """A function of `torch.distributed` that a rank is in, and that all ranks of a group must call.

    Attributes:
        group: name of the group, the same on all of them.
        number: how many collectives it has begun in that group, this one among them; None where nobody
            counts.
        counts_messages: whether sends and receives are counted, too.
    """

    function: str
    ranks: tuple[int, ...]
    group: str
    number: int | None
    counts_messages: bool = False


def script_line(frame: FrameType) -> str:
    """``file:line`` of the innermost function that is neither PyTorch's nor ours; empty where none is."""
    current: FrameType | None = frame
    while current is not None:
        module = current.f_globals.get("__name__", "")
        if not module.startswith(_OURS) and module != "torch":
            return f"{current.f_code.co_filename}:{current.f_lineno}"
        current = current.f_back
    return ""


def waits_for_others(frame: FrameType) -> bool:
    """Whether a thread is in a function that waits for messages of other ranks."""
    current: FrameType | None = frame
    while current is not None and current.f_globals.get("__name__", "") in _HELPERS:
        current = current.f_back
    return current is not None and current.f_globals.get("__name__", "").startswith(_WAITING)


def joint_call(frame: FrameType) -> JointCall | None:
    """The function of `torch.distributed` that a thread is in and that all ranks of a group must call."""
    current: FrameType | None = frame
    found = None
    while current is not None:
        name = current.f_code.co_name
        if current.f_globals.get("__name__") == _MODULE and name in _JOINT:
            found = current  # the outermost one: all_gather_object calls all_gather
        current = current.f_back
    if found is None:
        return None
    group = found.f_locals.get("group")
    group = dist.group.WORLD if group is None else group
    if not isinstance(group, dist.ProcessGroup):
        return None
    ranks = _ranks_of(group)
    if not ranks:
        return None
    return JointCall(
        found.f_code.co_name,
        ranks,
        group.group_name,
        number_of_collectives(group),
        counts_messages=counts_messages(group),
    )


def collectives_made(name: str, ranks: tuple[int, ...]) -> int | None:
    """The number of collectives that this rank has begun in a group."""
    group = group_named(name)
    return None if group is None or _ranks_of(group) != ranks else number_of_collectives(group)


def _ranks_of(group: dist.ProcessGroup) -> tuple[int, ...]:
    """World ranks; none where the group is gone: the script goes on while another thread looks."""
    try:
        return tuple(dist.get_process_group_ranks(group))
    except (KeyError, ValueError, RuntimeError):
        return ()


_WAITS = {("shardwright.comm.local_peers", "_until"), ("shardwright.comm.transport", "_wait")}


def waits_for_message(frame: FrameType | None) -> tuple[int, ...]:
    """The rank whose message a thread waits for, or which is to take one; empty where it waits for none."""
    for _ in range(_FRAMES):
        if frame is None:
            break
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in _WAITS:
            found = frame.f_locals
            return (found["rank"] if "rank" in found else found["link"].peer,)
        frame = frame.f_back
    return ()


def told_in_a_line(frame: FrameType | None, *, steps: int, in_step: bool, action: str) -> str:
    """What a rank does: the step, the action, the line of the script."""
    line = "" if frame is None else script_line(frame)
    step = f"in step {steps + 1}" if in_step else f"after step {steps}"
    return ", ".join(filter(None, (step, action, line and f"at {line}")))


_FRAMES = 6
"""Innermost functions that must be at the same lines."""
_MOST_LINES = 12


class Stillness:
    """Looks at a thread now and then; another thread calls it."""

    def __init__(self, thread_id: int):
        self._thread_id = thread_id
        self._place: tuple[tuple[int, int], ...] = ()
        self._since_s = time.monotonic()

    def look(self) -> None:
        """Notes where the thread is."""
        place = _place(self.frame)
        if place != self._place:
            self._place, self._since_s = place, time.monotonic()

    @property
    def frame(self) -> FrameType | None:
        """The innermost function of the thread; None if it has ended."""
        return sys._current_frames().get(self._thread_id)

    @property
    def seconds(self) -> float:
        """How long it has been where it was at the last look, at least."""
        return time.monotonic() - self._since_s

    @property
    def waits(self) -> bool:
        """Whether it waits for other ranks."""
        frame = self.frame
        return frame is not None and waits_for_others(frame)

    @property
    def outline(self) -> str:
        """Its innermost functions, each in a line: what can be told at all times, without reading sources."""
        frame, lines = self.frame, list[str]()
        while frame is not None and len(lines) < _MOST_LINES:
            lines.append(f"  {frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}")
            frame = frame.f_back
        return "\n".join(reversed(lines))

    @property
    def stack(self) -> str:
        """Its stack as in a traceback, the innermost function last."""
        frame = self.frame
        if frame is None:
            return ""
        lines = "".join(traceback.format_list(traceback.extract_stack(frame))).rstrip().splitlines()
        return "\n".join(lines[-_MOST_LINES:])


def _place(frame: FrameType | None) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    while frame is not None and len(found) < _FRAMES:
        found.append((id(frame.f_code), frame.f_lineno))
        frame = frame.f_back
    return tuple(found)


@dataclass(frozen=True, slots=True)
class MeetingPlace:
    """A call that several ranks make together.

    Attributes:
        number: how many calls these ranks have made together by now, this one among them.
        name: what all of them call it, where they make it by different calls, as a sender and a receiver do.
        meeting: how many of those calls only waited for all of these ranks. All of them have the same number
            then, while one of the others may have failed on one rank before it reached the others.
        hint: what to try, for ranks that wait in vain for one that is here.
    """

    where: str
    ranks: tuple[int, ...]
    number: int
    name: str = ""
    meeting: int = 0
    hint: str = ""

    @property
    def key(self) -> str:
        """A name that the same call has on all of its ranks, and no other call of the run."""
        return f"{digest(self.ranks)}/{self.meeting}/{self.name or self.where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """The whereabouts of a rank.

    Attributes:
        place: the call that it is in; None where it is in none.
        counts: for each set of ranks, how many calls it has made with them.
        ended: why it will make no more calls; empty where it may.
        joint: the function of `torch.distributed` that it waits in.
        counts_hold: whether all calls that it has counted ended well. One that failed may have failed on this
            rank alone, before others came: then the counts differ for good.
        still_s: how long its innermost functions have been at the same lines.
        stack: those of them and around them, if it does not wait and has been there for some seconds.
    """

    place: MeetingPlace | None = None
    counts: tuple[tuple[tuple[int, ...], int], ...] = ()
    seconds: float = 0.0
    line: str = ""
    ended: str = ""
    failed: bool = False
    joint: JointCall | None = None
    counts_hold: bool = True
    steps: int = 0
    waits: bool = False
    still_s: float = 0.0
    stack: str = ""

    def common_calls(self, rank: int) -> int:
        """The number of calls that it has made together with another rank."""
        return sum(count for ranks, count in self.counts if rank in ranks)

    def to_text(self) -> str:
        """The form in the store."""
        parts = {
            "place": _written(self.place),
            "counts": {spans(ranks): count for ranks, count in self.counts},
            "joint": _written(self.joint),
        }
        names = ("seconds", "line", "ended", "failed", "counts_hold", "steps", "waits", "still_s", "stack")
        plain = {name: getattr(self, name) for name in names}
        return json.dumps(parts | plain)

    @classmethod
    def from_text(cls, text: bytes | str) -> "Note":
        """Reads it."""
        found: dict[str, Any] = json.loads(text)
        place, joint = found.pop("place"), found.pop("joint")
        counts = tuple((ranks_in(ranks), count) for ranks, count in found.pop("counts").items())
        return cls(
            place=None if place is None else MeetingPlace(**_read(place)),
            joint=None if joint is None else JointCall(**_read(joint)),
            counts=counts,
            **found,
        )

    def __str__(self) -> str:
        if self.ended:
            return self.ended
        since = f" for {self.seconds:.0f} s" if self.seconds >= 1 else ""
        at = f" ({self.line})" if self.line else ""
        if self.place is not None:
            return f"is in {self.place.where}{at}{since}"
        if self.joint is not None:
            return f"waits in torch.distributed.{self.joint.function}{at}{since}"
        return f"is at {self.line}{since}" if self.line else "is elsewhere in the script"


def _written(part: MeetingPlace | JointCall | None) -> dict[str, Any] | None:
    if part is None:
        return None
    return {each.name: getattr(part, each.name) for each in fields(part)} | {"ranks": spans(part.ranks)}


def _read(part: Mapping[str, Any]) -> dict[str, Any]:
    return {**part, "ranks": ranks_in(part["ranks"])}


_LONGEST_NAME = 64
# How all of them call it, and how this one does; who makes it, and how many such calls these have made.
_MESSAGE = struct.Struct(f"={_LONGEST_NAME}s{_LONGEST_NAME}s16sQ")


def message_of(place: MeetingPlace) -> Tensor:
    """Says to which call this rank has come."""
    return torch.frombuffer(bytearray(_packed(place)), dtype=torch.uint8)


def no_message() -> Tensor:
    """Room for what another rank says."""
    return torch.zeros(_MESSAGE.size, dtype=torch.uint8)


def call_in(message: Tensor) -> str:
    """The call to which another rank has come, as its script writes it."""
    where = _MESSAGE.unpack(_bytes(message))[1]
    return str(where.rstrip(b"\0").decode(errors="replace"))


def is_of_before(message: Tensor, place: MeetingPlace) -> bool:
    """Whether another rank has come to a call before this one, of the same ranks."""
    _, _, ranks, meeting = _MESSAGE.unpack(_bytes(message))
    return bool(ranks == digest(place.ranks).encode() and meeting < place.meeting)


def other_call(message: Tensor, place: MeetingPlace) -> str | None:
    """The call to which another rank has come, where it is another one."""
    name, _, *call = _MESSAGE.unpack(_bytes(message))
    own_name, _, *own_call = _MESSAGE.unpack(_packed(place))
    return None if (name, call) == (own_name, own_call) else call_in(message)


def _packed(place: MeetingPlace) -> bytes:
    name, where = (part.encode()[:_LONGEST_NAME] for part in (place.name or place.where, place.where))
    return _MESSAGE.pack(name, where, digest(place.ranks).encode(), place.meeting)


def _bytes(message: Tensor) -> bytes:
    return bytes(message.tolist())

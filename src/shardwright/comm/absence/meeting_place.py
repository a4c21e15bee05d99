"""A joint call of several ranks, and what a rank reports of its place."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from shardwright.comm.absence.python_place import JointCall
from shardwright.comm.identity.rank_set import digest, ranks_in, spans

__all__ = ["MeetingPlace", "Note"]


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
        seconds: how long it has been there.
        ended: why it will make no more calls; empty where it may.
        failed: it has ended with an error.
        joint: the function of `torch.distributed` that it waits in.
        counts_hold: whether all calls that it has counted ended well. One that failed may have failed on this
            rank alone, before others came: then the counts differ for good.
        steps: training steps that it has made.
        waits: it waits for messages of others.
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

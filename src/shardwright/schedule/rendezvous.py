"""Replays the rows with sends that block until their receive is posted.

::

    rank 0 | SEND->1 ...         both wait for a receive that stands behind the other's send:
    rank 1 | SEND->0 ...         a deadlock, which preposted receives avoid

    rank 0 | RECV<-1 SEND->1 ...
    rank 1 | RECV<-0 SEND->0 ...
"""

from collections.abc import Sequence

from shardwright.errors import ScheduleError
from shardwright.schedule.actions import HOST_COPIES, Action, Kind
from shardwright.schedule.schedule import Schedule

__all__ = ["MessageKey", "check_progress", "message_key"]

MessageKey = tuple[Kind, int, int, int]
"""Kind of its send, sending stage, receiving stage, microbatch."""


def message_key(action: Action) -> MessageKey:
    """The message that a send or a receive belongs to."""
    peer = -1 if action.peer is None else action.peer
    if action.kind is Kind.RECV_F:
        return (Kind.SEND_F, peer, action.stage, action.microbatch)
    if action.kind is Kind.RECV_B:
        return (Kind.SEND_B, peer, action.stage, action.microbatch)
    return (action.kind, action.stage, peer, action.microbatch)


def check_progress(schedule: Schedule, messages: Sequence[MessageKey]) -> None:
    """Plays the rows to their end.

    Args:
        schedule: with transfers, each message sent once and received once.
        messages: all of them.

    Raises:
        ScheduleError: ranks wait for one another in a circle, which the message shows.
    """
    player = _Player(schedule, messages)
    runnable = list(range(schedule.num_ranks))
    while runnable:
        runnable += player.run(runnable.pop())
    if player.awaited:
        raise ScheduleError(player.describe_deadlock())


class _Player:
    def __init__(self, schedule: Schedule, messages: Sequence[MessageKey]) -> None:
        self.rows = schedule.actions
        self.ranks = schedule.stage_ranks
        self.position = [0] * len(self.rows)
        self.posted: set[MessageKey] = set()
        self.delivered: set[MessageKey] = set()
        self.awaited: dict[int, MessageKey] = {}  # rank -> the message that it stands at
        self.inputs: dict[tuple[bool, int, int], list[MessageKey]] = {}
        for key in messages:
            kind, _, receiver, microbatch = key
            self.inputs.setdefault((kind is Kind.SEND_F, receiver, microbatch), []).append(key)

    def run(self, rank: int) -> list[int]:
        """Runs a rank as far as it gets; returns the ranks that can go on because of it."""
        row, woken = self.rows[rank], []
        self.awaited.pop(rank, None)
        while self.position[rank] < len(row):
            action = row[self.position[rank]]
            if action.kind in HOST_COPIES:
                pass  # waits for no other rank
            elif action.is_compute:
                missing = self._missing_input(action)
                if missing is not None:
                    self.awaited[rank] = missing
                    break
            else:
                key = message_key(action)
                other = self.ranks[key[2] if action.kind in (Kind.SEND_F, Kind.SEND_B) else key[1]]
                if action.kind in (Kind.RECV_F, Kind.RECV_B):
                    self.posted.add(key)
                elif key in self.posted:
                    self.delivered.add(key)
                else:
                    self.awaited[rank] = key
                    break
                if self.awaited.get(other) == key:
                    woken.append(other)
            self.position[rank] += 1
        return woken

    def _missing_input(self, action: Action) -> MessageKey | None:
        if action.kind is Kind.BACKWARD_WEIGHT:
            return None
        wanted = self.inputs.get((action.kind is Kind.FORWARD, action.stage, action.microbatch), ())
        return next((key for key in wanted if key not in self.delivered), None)

    def describe_deadlock(self) -> str:
        """Follows who waits for whom until the circle closes."""
        rank = min(self.awaited)
        seen: list[int] = []
        while rank not in seen:
            seen.append(rank)
            rank = self._holder(rank)
        circle = seen[seen.index(rank) :]
        steps = "; ".join(self._stands(rank) for rank in circle)
        return (
            f"the schedule deadlocks when sends block until their receive is posted: {steps}. "
            "Post the receives earlier, or lower the compute actions anew."
        )

    def _holder(self, rank: int) -> int:
        """The rank at the other end of the message for which a rank waits."""
        _, sender, receiver, _ = self.awaited[rank]
        ends = (self.ranks[sender], self.ranks[receiver])
        return ends[0] if ends[1] == rank else ends[1]

    def _stands(self, rank: int) -> str:
        action = self.rows[rank][self.position[rank]]
        kind, sender, receiver, microbatch = self.awaited[rank]
        if action.is_compute:
            awaited = str(Action(kind, sender, microbatch))
        else:
            awaited = str(Action(Kind.RECV_F if kind is Kind.SEND_F else Kind.RECV_B, receiver, microbatch))
        return f"rank {rank} stands at {action} and waits for {awaited} of rank {self._holder(rank)}"

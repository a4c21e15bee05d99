"""Names between ranks: of the backend, of a message's purpose, of sets of ranks, of the loss of a peer."""

import hashlib
import re
from collections.abc import Sequence
from enum import IntEnum
from functools import lru_cache

from shardwright.errors import PeerLostError, PeerTimeoutError

BACKEND = "shardwright"


class Purpose(IntEnum):
    """Goes with every message between ranks of one host, so that ranks at different places notice it.

    >>> print(Purpose.BATCH)
    the batch of a step
    """

    PIPELINE = 0
    BATCH = 1
    OUTPUTS = 2
    AGREEMENT = 3
    FIGURES = 4
    NORM = 5
    MEETING = 6
    CHECKPOINT = 7
    UPDATE = 8
    FACTS = 9

    def __str__(self) -> str:
        return _TEXTS[self]


_TEXTS = {
    Purpose.PIPELINE: "a tensor between stages",
    Purpose.BATCH: "the batch of a step",
    Purpose.OUTPUTS: "the outputs of a step",
    Purpose.AGREEMENT: "what ranks agree on in a step",
    Purpose.FIGURES: "the figures of a step",
    Purpose.NORM: "a norm of gradients",
    Purpose.CHECKPOINT: "whether a checkpoint is due (step_done, save or wait of sw.Checkpoints)",
    Purpose.UPDATE: "a number that an optimizer takes over all stages (step of DistributedOptimizer)",
    Purpose.FACTS: "what ranks tell each other (such as whether each can save)",
    Purpose.MEETING: "a call on all ranks, such as model.state_dict() or sw.barrier()",
}


_SHORTEST_SPAN = 3


@lru_cache(maxsize=1024)
def spans(ranks: tuple[int, ...]) -> str:
    """Ranks in their order, as first-last/step where at least three are evenly apart.

    >>> spans((0, 1, 2, 3, 8, 16, 24))
    '0-3,8-24/8'
    """
    parts: list[str] = []
    begin = 0
    while begin < len(ranks):
        end = begin + 1
        step = ranks[end] - ranks[begin] if end < len(ranks) else 0
        while step > 0 and end < len(ranks) and ranks[end] - ranks[end - 1] == step:
            end += 1
        if end - begin >= _SHORTEST_SPAN:
            parts.append(f"{ranks[begin]}-{ranks[end - 1]}{f'/{step}' if step > 1 else ''}")
            begin = end
        else:
            parts.append(str(ranks[begin]))
            begin += 1
    return ",".join(parts)


@lru_cache(maxsize=1024)
def ranks_in(text: str) -> tuple[int, ...]:
    """Reads what `spans` has written.

    >>> ranks_in("0-3,8-24/8")
    (0, 1, 2, 3, 8, 16, 24)
    """
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, rest = part.partition("-")
        last, _, step = rest.partition("/")
        found += range(int(first), int(last or first) + 1, int(step or 1))
    return tuple(found)


@lru_cache(maxsize=1024)
def digest(ranks: tuple[int, ...]) -> str:
    """A short name of these ranks in this order."""
    return hashlib.blake2b(spans(ranks).encode(), digest_size=8).hexdigest()


def listed(ranks: Sequence[int]) -> str:
    """For people: with runs of them shortened.

    >>> listed((0, 1, 2, 3, 6))
    '0 to 3, 6'
    """
    parts: list[str] = []
    begin = 0
    for i in range(1, len(ranks) + 1):
        if i == len(ranks) or ranks[i] != ranks[i - 1] + 1:
            first, last = ranks[begin], ranks[i - 1]
            if last - first > 1:
                parts.append(f"{first} to {last}")
            else:
                parts += map(str, ranks[begin:i])
            begin = i
    return ", ".join(parts)


_LATE = r"Timed out waiting \d+ms for"
_TIMED_OUT = re.compile(_LATE, re.IGNORECASE)

_LATE_REMEDY = (
    "It hangs, is at another place of the script, or its host cannot be reached; its log may tell. If it may "
    "take longer, raise the setting timeout_s."
)

# What gloo, NCCL, the TCP store and Shardwright say when the other end has gone.
_PEER_GONE = re.compile(
    r"connection (was )?(closed|reset|refused|aborted)|broken pipe|failed to (recv|connect)"
    r"|recvBytes|sendBytes|PeerLostError|PeerTimeoutError|ncclRemoteError|ncclSystemError"
    rf"|remote process exited|{_LATE}",
    re.IGNORECASE,
)


def names_a_lost_peer(error: str) -> bool:
    """Says whether a traceback, or any text of an error, ends with the loss of a peer: a consequence,
    not a cause.

    >>> names_a_lost_peer("RuntimeError: Connection closed by peer [127.0.0.1]:1234")
    True
    >>> names_a_lost_peer("ValueError: boom")
    False
    """
    lines = error.splitlines()
    # The source lines of a traceback may hold such words too, in a handler for example: only the
    # message counts.
    start = next((i for i in range(len(lines) - 1, -1, -1) if lines[i].lstrip().startswith("File ")), 0)
    return _PEER_GONE.search("\n".join(lines[start:])) is not None


def lost_peer(message: str, *, rank: int | None = None) -> PeerLostError:
    """The error for a message that quotes what gloo or NCCL said, with what to do.

    >>> type(lost_peer("receiving failed: Timed out waiting 8000ms for recv operation")).__name__
    'PeerTimeoutError'
    """
    if not _TIMED_OUT.search(message):
        return PeerLostError(message, rank=rank)
    return PeerTimeoutError(f"{message}. {_LATE_REMEDY}", rank=rank)

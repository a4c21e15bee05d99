"""Words the loss of a peer for error texts."""

import re

from shardwright.errors import PeerLostError, PeerTimeoutError

__all__ = ["lost_peer", "names_a_lost_peer"]

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

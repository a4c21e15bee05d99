"""Sets of ranks in short form, for store keys, notes and people."""

import hashlib
from collections.abc import Sequence
from functools import lru_cache

__all__ = ["digest", "listed", "ranks_in", "spans"]

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

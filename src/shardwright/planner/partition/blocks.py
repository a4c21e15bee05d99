"""Keeps cuts on the boundaries of a model's blocks, which people can name.

A block is a module with a number for a name, such as ``layers.2``; its parts are called one after the other::

    embed | layers.0.attention  layers.0.mlp | layers.1.attention  layers.1.mlp | head
          0                   1              0                   1              0       nesting of each cut
"""

import itertools
from collections.abc import Sequence

__all__ = ["block_of", "nesting_of", "on_boundaries"]


def nesting_of(labels: Sequence[str], cut: int) -> int:
    """The number of blocks that a cut before a call runs through.

    >>> labels = ["embed", "layers.0.attention", "layers.0.mlp", "layers.1.attention"]
    >>> [nesting_of(labels, cut) for cut in (1, 2, 3)]
    [0, 1, 0]
    """
    before, behind = (labels[at].partition("#")[0].split(".") for at in (cut - 1, cut))
    nesting = 0
    for ours, theirs in zip(before[:-1], behind[:-1], strict=False):
        if ours != theirs:
            break
        nesting += ours.isdecimal()
    return nesting


def block_of(labels: Sequence[str], call: int, *, ends: bool) -> str:
    """What a stage begins or ends with: the outermost block that begins or ends there too, or else the call.

    >>> labels = ["embed", "layers.0.attention", "layers.0.mlp", "layers.1.attention"]
    >>> block_of(labels, 1, ends=False), block_of(labels, 1, ends=True)
    ('layers.0', 'layers.0.attention')
    """
    cut = call + ends
    parts = labels[call].partition("#")[0].split(".")
    numbers = [place for place, part in enumerate(parts) if part.isdecimal()]
    nesting = nesting_of(labels, cut) if 0 < cut < len(labels) else 0
    return ".".join(parts[: numbers[nesting] + 1]) if nesting < len(numbers) else labels[call]


def on_boundaries(
    cuts: Sequence[int], labels: Sequence[str], seconds: Sequence[float], allowed: Sequence[int]
) -> tuple[int, ...] | None:
    """Moves each cut that runs through a block to the nearest boundary, by the seconds between them.

    >>> labels = ["embed", "layers.0.attention", "layers.0.mlp", "layers.1.attention", "layers.1.mlp"]
    >>> on_boundaries([0, 2, 5], labels, [1, 4, 3, 4, 3], allowed=range(6))
    (0, 3, 5)
    """
    inner = [position for position in allowed if 0 < position < len(labels)]
    nesting = {position: nesting_of(labels, position) for position in inner}
    elapsed = [0.0]
    for each in seconds:
        elapsed.append(elapsed[-1] + each)
    moved = [0]
    for cut, following in itertools.pairwise(cuts[1:]):
        there = [position for position in inner if moved[-1] < position < following or position == cut]
        if cut not in nesting or cut <= moved[-1]:
            return None
        moved.append(min(there, key=lambda at: (nesting[at], abs(elapsed[at] - elapsed[cut]))))
    found = (*moved, cuts[-1])
    return None if found == tuple(cuts) else found

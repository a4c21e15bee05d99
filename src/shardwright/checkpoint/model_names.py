"""Maps the names of a model's tensors between a checkpoint and files of other libraries."""

from collections.abc import Iterable

from shardwright.errors import CheckpointError

__all__ = ["MODEL", "in_order", "without_prefix"]

MODEL = "model/"
"""What the names of a model's tensors begin with in a checkpoint."""

_MOST_NAMES = 5


def without_prefix(names: Iterable[str], prefix: str, *, where: str) -> dict[str, str]:
    """Takes a prefix from names; returns the names that are left, by the names before."""
    every = list(names)
    lacking = [name for name in every if not name.startswith(prefix) or name == prefix]
    if lacking:
        more = len(lacking) - _MOST_NAMES
        listed = ", ".join(in_order(lacking)[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
        raise CheckpointError(
            f"{len(lacking)} of {len(every)} tensors of {where} have no prefix {prefix!r}: {listed}. Give "
            "the prefix that all of them have, or none."
        )
    return {name: name[len(prefix) :] for name in every}


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted, with numbers in them as numbers.

    >>> in_order(["h.10.bias", "h.2.bias", "wte"])
    ['h.2.bias', 'h.10.bias', 'wte']
    """
    return sorted(names, key=_key)


def _key(name: str) -> list[tuple[int, int, str]]:
    return [(1, int(part), "") if _is_number(part) else (0, 0, part) for part in name.split(".")]


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdigit() and len(part) < 20

"""Walks the objects, containers and modules that code can get at from some roots."""

import math
import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from types import BuiltinFunctionType, CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.torch.python_state.watch import WatchedDict
from shardwright.torch.pytorch.slots import entries_of, slots_of

__all__ = ["is_of_a_library", "is_plain_object", "walk"]

# Other kinds may do things when they are read.
_CONTAINERS = frozenset({dict, OrderedDict, defaultdict, Counter, list, deque, set})
_NOTHING_INSIDE = frozenset(
    {type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size}
)
_LEAVES = (Tensor, random.Random, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
# Registries, locks, queues.
_LIBRARIES = (
    *("torch.", "builtins.", "typing.", "collections.", "functools.", "asyncio.", "concurrent.", "logging."),
    *("multiprocessing.", "queue.", "threading.", "weakref."),
)
_AT_WORK = ("shardwright.", "smdistributed.")  # in the trace
_LONGEST = 10_000  # what is beyond is data


def walk(
    roots: Iterable[tuple[Any, float]],
    *,
    most: float = math.inf,
    longest: int = _LONGEST,
    skips: Callable[[Any], bool] = lambda item: False,
    enters: Callable[[type], bool] = lambda kind: False,
) -> Iterator[tuple[Any, dict[Any, Any] | None]]:
    """Goes through objects and what they hold, near ones first, each once."""
    rest, seen = deque(roots), set[int]()
    while rest:
        item, steps = rest.popleft()
        # Not isinstance(): a proxy may do things when it is asked for its class.
        kind = type(item)
        if kind in _NOTHING_INSIDE or id(item) in seen or skips(item):
            continue
        holds = enters(item) if issubclass(kind, type) else _has_entries(item)
        if holds and steps <= 0:
            continue
        seen.add(id(item))
        entries = None
        is_sized = kind in _CONTAINERS or issubclass(kind, tuple)
        if holds and most > 0 and (not is_sized or len(item) <= min(most, longest)):
            entries = entries_of(item)
            most -= len(entries)
            rest += [(inner, steps - 1) for inner in entries.values()]
        yield item, entries


def _has_entries(item: Any) -> bool:
    kind = type(item)
    if kind in _CONTAINERS or kind is CellType or kind is WatchedDict:
        return True
    if issubclass(kind, _LEAVES) or f"{kind.__module__}.".startswith(_AT_WORK):
        return False
    if issubclass(kind, tuple | nn.Module):
        return True
    return is_plain_object(item) or (not is_of_a_library(kind) and bool(slots_of(kind)))


def is_of_a_library(kind: type) -> bool:
    """Whether a class is one of Python's or torch's, whose objects keep what is not the model's."""
    return f"{kind.__module__}.".startswith(_LIBRARIES)


def is_plain_object(item: Any) -> bool:
    """Whether it is an object with attributes, of a class of the user's own or of a library of models."""
    if is_of_a_library(type(item)) or not type(item).__dictoffset__:
        return False
    try:
        return type(vars(item)) is dict
    except Exception:
        return False  # a proxy of something that is not there yet

"""Brings CPU mode to `multiprocessing` children: forked ones inherit it, spawned ones activate it.

A spawned process unpickles its parent's preparation before it imports the script; that unpickling activates
CPU mode. Only children of a process in CPU mode get it.
"""

import functools
from collections.abc import Callable
from multiprocessing import spawn
from typing import Any

__all__ = ["put_in_force"]


def put_in_force(enable: Callable[..., None]) -> None:
    """Has processes that are spawned begin with CPU mode."""
    prepare: Any = spawn.get_preparation_data

    @functools.wraps(prepare)
    def with_cpu_mode(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**prepare(*args, **kwargs), "shardwright.cpu_mode": _Activation(enable)}

    spawn.get_preparation_data = with_cpu_mode


class _Activation:
    """Unpickling it puts CPU mode in force."""

    def __init__(self, enable: Callable[..., None]):
        self._enable = enable

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return functools.partial(self._enable, says_so=False), ()

"""Closes connections in forked children of this process.

Otherwise the children, such as a data loader's workers, would hide from other ranks that this process has
ended.
"""

import os
import weakref
from typing import Protocol

__all__ = ["close_in_children"]


class _Closable(Protocol):
    def close(self) -> None: ...


_OPEN: "weakref.WeakSet[_Closable]" = weakref.WeakSet()


def close_in_children(connection: _Closable) -> None:
    """Has every process that is forked from this one close a connection."""
    _OPEN.add(connection)


def _close() -> None:
    for connection in _OPEN:
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close)

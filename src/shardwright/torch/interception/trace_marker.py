"""Tells a script whether its step function runs on a batch, or only to be traced and timed."""

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["is_tracing", "tracing"]


class _Marker:
    depth = 0


def is_tracing() -> bool:
    """Whether the step function, or a module of the model, runs only to see or to time what it does.

    The first step calls the step function a few more times than there are microbatches, and so does one
    whose batch has other shapes. What a script counts in variables of its own counts these calls, unless::

        if not sw.is_tracing():
            counter += 1
    """
    return _Marker.depth > 0


@contextmanager
def tracing() -> Iterator[None]:
    """Code of the script that runs inside runs for no batch."""
    _Marker.depth += 1
    try:
        yield
    finally:
        _Marker.depth -= 1

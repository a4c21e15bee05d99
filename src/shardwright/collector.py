"""Keeps Python's garbage collector away from work that makes many objects which stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_paused"]


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collects nothing inside, as each pass would look at all modules anew: a quarter of an import.

    What was made inside then counts as old: else the next object would start a pass over all of it.
    """
    was_enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    try:
        yield
    finally:
        if not frozen:  # what somebody else has frozen stays so
            gc.freeze()
            gc.unfreeze()
        if was_enabled:
            gc.enable()

"""Attributes of other packages, replaced for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorflow.python.autograph.impl import api as autograph

__all__ = ["added", "replaced"]


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute by what `make` makes of it, for as long as the context lasts."""
    own = name in vars(owner)
    original = getattr(owner, name)
    made = make(original)
    # AutoGraph would convert what it comes upon inside of a step function, with no use and not always right.
    # It goes on with what is called in there, so `do_not_convert` is too much.
    setattr(owner, name, autograph.autograph_artifact(made) if callable(made) else made)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


@contextmanager
def added(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Gives a class an attribute that it lacks, for as long as the context lasts."""
    setattr(owner, name, value)
    try:
        yield
    finally:
        delattr(owner, name)

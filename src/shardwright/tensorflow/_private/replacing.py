"""Attributes of other packages, replaced for a while."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

__all__ = ["added", "replaced"]


@contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute by what `make` makes of it, for as long as the context lasts."""
    own = name in vars(owner)
    original = getattr(owner, name)
    made = make(original)
    # AutoGraph would convert what it comes upon inside of a step function, with no use and not always right.
    setattr(owner, name, tf.autograph.experimental.do_not_convert(made) if callable(made) else made)
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

"""Random numbers that a step function draws with Python's ``random`` or NumPy.

Such a draw cannot be intercepted; only the generator's state shows that it happened. Ranks draw the same
numbers if all begin a batch with the first rank's state, and if each reaches the draws in the same order.
That is the order of the microbatches as long as all draws are in one place::

    rank 0 | mb 0: draws | mb 1: draws | mb 0: later stage ...
    rank 1 | mb 0: draws, stage 1      | mb 1: draws, stage 1
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "SKIPS_BY_PYTHON",
    "DrawsOfPython",
    "PythonState",
    "get_python_mark",
    "get_python_state",
    "kept_state",
    "python_random_kept",
    "set_python_state",
    "state_as_tensor",
    "state_from_tensor",
]

SKIPS_BY_PYTHON = (
    "The step function draws random numbers of Python or NumPy between modules. If they decide which layers "
    "are called (layer dropping): draw in the forward of the layer, by torch.rand(()), and give its input "
    "back there; or call it always, and choose behind it by torch.where."
)
"""For errors of step functions that go another way each time."""

PythonState = tuple[Any, tuple[Any, ...]]
"""State of Python's generator, and of NumPy's."""


def kept_state(item: Any) -> Callable[[], Any] | None:
    """A function that puts a generator of a script back to its present state; None for other objects."""
    kind = type(item)
    if kind is random.Random:
        return partial(item.setstate, item.getstate())
    if kind is np.random.RandomState:
        return partial(item.set_state, item.get_state())
    if kind is np.random.Generator:
        return partial(setattr, item.bit_generator, "state", item.bit_generator.state)
    return None


class DrawsOfPython:
    """Notices draws during a trace.

    Attributes:
        places: how many steps had run when numbers were drawn between units.
        in_units: some unit has drawn too.
    """

    def __init__(self, position: Callable[[], float]):
        self.places: list[float] = []
        self.in_units = False
        self._position = position
        self._last = get_python_mark()

    def look(self) -> None:
        """To be called before every step, and at the end."""
        now = get_python_mark()
        if now != self._last:
            self.places.append(self._position())
            self._last = now

    @contextmanager
    def around_unit(self) -> Iterator[None]:
        """Leaves draws inside out of the draws between units; to be entered after `look`."""
        try:
            yield
        finally:
            now = get_python_mark()
            self.in_units = self.in_units or now != self._last
            self._last = now


@contextmanager
def python_random_kept() -> Iterator[None]:
    """Puts the generators back in the end."""
    before = get_python_state()
    try:
        yield
    finally:
        set_python_state(before)


def get_python_state() -> PythonState:
    """The state of both generators."""
    return random.getstate(), np.random.get_state()  # type: ignore[return-value]


def set_python_state(state: PythonState) -> None:
    """Sets both generators."""
    python, numpy = state
    random.setstate(python)
    np.random.set_state(numpy)


def state_as_tensor() -> Tensor:
    """The state of both generators; float64, of the same size always."""
    (_, words, gauss), (_, keys, position, has_gauss, cached) = get_python_state()
    row = [*words, float(gauss is not None), gauss or 0.0, position, has_gauss, cached]
    return torch.cat([torch.tensor(row, dtype=torch.float64), torch.from_numpy(keys.astype(np.float64))])


def state_from_tensor(state: Tensor) -> None:
    """Sets both generators as they were when `state_as_tensor` gave this."""
    (version, words, _), (kind, keys, *_) = get_python_state()
    row = state.tolist()
    has, gauss, position, has_cached, cached = row[len(words) : len(words) + 5]
    random.setstate((version, tuple(int(word) for word in row[: len(words)]), gauss if has else None))
    new = np.array(row[len(words) + 5 :]).astype(keys.dtype)
    np.random.set_state((kind, new, int(position), int(has_cached), cached))


def get_python_mark() -> tuple[Any, ...]:
    """A mark that stays equal as long as nothing is drawn."""
    python, (_, keys, *rest) = get_python_state()
    return python, keys.tobytes(), *rest

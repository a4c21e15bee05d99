"""Tells, in a trace, which random numbers are those that a plain loop would draw in its row.

A draw is in the row if the generator is where the draw before has left it. It is not after a seed, or in a
backward inside of a unit that computes something again: nothing need be run ahead for it::

    a unit         draws     fork_rng, manual_seed(7)   draws   end of fork_rng   draws
    generator   s0 ──▶ s1              s7               ──▶ ...       s1          ──▶ s2
    in the row      yes                                  no                       yes

Inside a unit that is all. Between units each rank seeds for itself, so only free operations may draw then,
and none that others may come in before.

A generator of the script's own is followed in the same way. One that is made inside the step function is left
to whoever makes it.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.torch._private import generator_key
from shardwright.torch.rng import Draw, get_state, is_default

__all__ = ["TracedDraws"]

_FIRST_SEED = 0x5EED_0000_0000


class TracedDraws:
    """Follows the generators through a trace.

    Args:
        device: where units compute.
        line: tells where in the user's code we are.

    Attributes:
        set_at: line where the step function draws, or ends, with generators that were set, so that ranks
            would draw other numbers than a plain loop; empty if it does not.
    """

    def __init__(self, device: torch.device, line: Callable[[], str]):
        self.set_at = ""
        self._device = device
        self._line = line
        self._num_moved = 0
        self._own: dict[int, tuple[torch.Generator, Tensor]] = {}  # with the state at the start
        self._others: dict[int, tuple[torch.Generator, Tensor]] = {}  # made inside, or not found
        self._own_left: dict[int, bytes] = {}
        self._own_drawn: set[int] = set()
        # A script may have set the very seed that its step function sets.
        torch.default_generator.manual_seed(_FIRST_SEED)
        self._left = self._state()
        self._nodes_when_set: int | None = None

    @property
    def generators(self) -> Collection[torch.Generator]:
        """Those of the script's own."""
        return [generator for generator, _ in self._own.values()]

    def follow(self, items: Iterable[Any]) -> None:
        """Takes note of the generators among what there is before the step function is called."""
        for item in items:
            if isinstance(item, torch.Generator) and not is_default(item):
                state = item.get_state()
                self._own[generator_key(item)] = item, state
                self._own_left[generator_key(item)] = _content(state)

    def put_back(self) -> None:
        """Sets all generators that were given to operations back to their start."""
        for generator, state in (*self._own.values(), *self._others.values()):
            generator.set_state(state)

    def has(self, draw: Draw) -> bool:
        """Whether a draw that is about to run is in the row."""
        own = draw.generator
        if own is None:
            return self.in_row
        if generator_key(own) not in self._own:
            self._others.setdefault(generator_key(own), (own, own.get_state()))
            return False
        return self._own_left[generator_key(own)] == _content(own.get_state())

    @property
    def in_row(self) -> bool:
        """Whether the generators are where the last draw has left them."""
        return self._state() == self._left

    def drawn(self, draw: Draw) -> None:
        """A draw in the row has run; where it had no data, the generator is moved on in its place."""
        own = draw.generator
        if self.has(draw):
            self._num_moved += 1
            (own or torch.default_generator).manual_seed(_FIRST_SEED + self._num_moved)
        if own is None:
            self._left = self._state()
        else:
            self._own_left[generator_key(own)] = _content(own.get_state())
            self._own_drawn.add(generator_key(own))

    def before_step(self, num_nodes: int) -> None:
        """To be called before every step.

        Args:
            num_nodes: of the graph so far.
        """
        if self.in_row:
            self._nodes_when_set = None
        elif self._nodes_when_set is None:
            self._nodes_when_set = num_nodes

    def after_step(self, num_nodes: int, *, draws: bool, free: bool) -> None:
        """To be called after every step.

        Args:
            num_nodes: of the graph before it.
            draws: it has taken random numbers.
            free: every rank executes it.
        """
        since = self._nodes_when_set
        elsewhere = since is not None and draws and not (free and num_nodes == since)
        sets = since is None and not free and not self.in_row
        if elsewhere or sets:
            self.set_at = self.set_at or self._line()

    def at_end(self, *, draws: bool) -> None:
        """To be called when the step function has returned.

        Args:
            draws: something was drawn in the row, so that every rank runs the generators ahead.
        """
        moved = any(_content(self._own[key][0].get_state()) != self._own_left[key] for key in self._own_drawn)
        if moved or (draws and not self.in_row):
            self.set_at = self.set_at or "at the end of the step function"

    def _state(self) -> tuple[bytes, ...]:
        return tuple(_content(state) for state in get_state(self._device) if state is not None)


def _content(state: Tensor) -> bytes:
    """Read past all modes, in which tensors have no data."""
    return ctypes.string_at(state.data_ptr(), state.nbytes)

"""Tells, in a trace, which random numbers are those that a plain loop would draw in its row.

A draw is in the row if the generator is where the draw before has left it. It is not after a seed, or in a
backward inside of a unit that computes something again: nothing need be run ahead for it::

    a unit         draws     fork_rng, manual_seed(7)   draws   end of fork_rng   draws
    generator   s0 ──▶ s1              s7               ──▶ ...       s1          ──▶ s2
    in the row      yes                                  no                       yes

Inside a unit that is all. Between units each rank seeds for itself, so only free operations may draw then,
and none that others may come in before.
"""

import ctypes
from collections.abc import Callable

import torch

from shardwright.torch.rng import get_state

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
        # A script may have set the very seed that its step function sets.
        torch.default_generator.manual_seed(_FIRST_SEED)
        self._left = self._state()
        self._nodes_when_set: int | None = None

    @property
    def in_row(self) -> bool:
        """Whether the generators are where the last draw has left them."""
        return self._state() == self._left

    def drawn(self) -> None:
        """A draw in the row has run; where it had no data, the generator is moved on in its place."""
        if self.in_row:
            self._num_moved += 1
            torch.default_generator.manual_seed(_FIRST_SEED + self._num_moved)
        self._left = self._state()

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
        if draws and not self.in_row:
            self.set_at = self.set_at or "at the end of the step function"

    def _state(self) -> tuple[bytes, ...]:
        """Read past all modes, in which tensors have no data."""
        states = (state for state in get_state(self._device) if state is not None)
        return tuple(ctypes.string_at(state.data_ptr(), state.nbytes) for state in states)

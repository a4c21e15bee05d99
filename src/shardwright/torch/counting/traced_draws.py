"""Tells which random draws of a trace continue the sequence of a plain loop.

A draw continues the sequence if the generator is where the previous draw left it. It does not after a seed,
or in a backward inside a unit that recomputes something: such draws need no fast-forward::

    a unit         draws     fork_rng, manual_seed(7)   draws   end of fork_rng   draws
    generator   s0 ──▶ s1              s7               ──▶ ...       s1          ──▶ s2
    in the row      yes                                  no                       yes

Inside a unit, this is the whole rule. Between units each rank seeds for itself, so only free operations may
draw there, and only where no other operation can come in before them.

A generator of the script's own is followed in the same way. If the step function creates it, every rank has
one, and only the rank that draws from it advances it: later draws must be on the same stage.
"""

import ctypes
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import TraceError
from shardwright.model_graph import Node, Together
from shardwright.torch._private import generator_key
from shardwright.torch.interception.glue import plain_torch
from shardwright.torch.randomness import Draw, get_state, is_default

_FIRST_SEED = 0x5EED_0000_0000


class TracedDraws:
    """Follows the generators through a trace.

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
        # Of others: where they were left, and by which node; None is a free operation.
        self._others_left: dict[int, tuple[bytes, int | None]] = {}
        self._handed_on: dict[tuple[int, int], None] = {}  # from which node to which
        self._found = b""
        self._node: int | None = None
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
        """Records the generators that exist before the step function is called."""
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
            self._find_other(own)
            return False
        return self._own_left[generator_key(own)] == _content(own.get_state())

    def _find_other(self, generator: torch.Generator) -> None:
        """Looks who has left a generator, that is about to be drawn from, as it is."""
        key, state = generator_key(generator), generator.get_state()
        self._others.setdefault(key, (generator, state))
        self._found = _content(state)
        left, maker = self._others_left.get(key, (b"", None))
        if maker is None or maker == self._node or left != self._found:
            return
        if self._node is None:
            raise TraceError(
                f"{self._line()}: numbers are drawn here from a torch.Generator that was made in the step "
                "function, and from which a module has drawn before. Only the rank of that module has it as "
                "the module leaves it. Make another generator, or keep one in the model or in a variable of "
                "the script: it is the same on all ranks."
            )
        self._handed_on[maker, self._node] = None

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

    def drawn_elsewhere(self, draw: Draw) -> None:
        """A draw that is not in the row has run; records the generator that was made in between."""
        own = draw.generator
        if own is None or generator_key(own) in self._own:
            return
        if self._found == _content(own.get_state()):  # there was no data
            self._num_moved += 1
            own.manual_seed(_FIRST_SEED + self._num_moved)
        self._others_left[generator_key(own)] = _content(own.get_state()), self._node

    def before_step(self, num_nodes: int, *, free: bool = False) -> None:
        """To be called before every step."""
        self._node = None if free else num_nodes
        if self.in_row:
            self._nodes_when_set = None
        elif self._nodes_when_set is None:
            self._nodes_when_set = num_nodes

    def after_step(self, num_nodes: int, *, draws: bool, free: bool) -> None:
        """To be called after every step."""
        since = self._nodes_when_set
        elsewhere = since is not None and draws and not (free and num_nodes == since)
        sets = since is None and not free and not self.in_row
        if elsewhere or sets:
            self.set_at = self.set_at or self._line()

    def at_end(self, *, draws: bool) -> None:
        """To be called when the step function has returned."""
        moved = any(_content(self._own[key][0].get_state()) != self._own_left[key] for key in self._own_drawn)
        if moved or (draws and not self.in_row):
            self.set_at = self.set_at or "at the end of the step function"

    def together(self, nodes: Sequence[Node]) -> list[Together]:
        """Nodes that draw from one generator which the step function has made."""
        return [
            Together(
                pair,
                what="a torch.Generator that is made in the step function",
                line=nodes[pair[1]].line,
                why=f"{nodes[pair[1]].name} draws from a torch.Generator from which {nodes[pair[0]].name} "
                "has drawn, and another stage would not have it as that leaves it.",
                remedy="Keep the generator in the model or in a variable of the script, where it is the same "
                "on all stages, or make one for each module.",
            )
            for pair in self._handed_on
        ]

    def _state(self) -> tuple[bytes, ...]:
        return tuple(_content(state) for state in get_state(self._device) if state is not None)


def _content(state: Tensor) -> bytes:
    """Read past all modes, in which tensors have no data, and by no operation of the step function."""
    with plain_torch():
        return ctypes.string_at(state.data_ptr(), state.nbytes)

"""One stage of this rank: runs its pieces, and keeps what they make for as long as it is needed.

::

    what other stages made ─▶ forward piece ─▶ sent on
                                  │ saved
    gradients that came in ─▶ backward piece ─▶ sent back, and gradients of this stage's variables
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from shardwright.errors import ScheduleError
from shardwright.runtime.crossings import Crossing
from shardwright.runtime.messages import Messages
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.routes import Part


class Results:
    """The outputs of a batch that this rank makes.

    A gradient is summed over the microbatches when it comes, so that a rank holds one of each, and not one
    for each microbatch. Microbatches end their backwards in order, so the sum has the order of a plain loop.

    Attributes:
        kept: what is not summed, of each microbatch by position.
    """

    def __init__(
        self, positions: Sequence[Mapping[str, Sequence[int]]], *, summed: Collection[int] = frozenset()
    ):
        self._positions = positions
        self._summed = summed
        self.sums: dict[int, Any] = {}
        self.kept: list[dict[int, Any]] = [{} for _ in positions]

    def take(self, microbatch: int, name: str, tensor: Any) -> None:
        """Takes a tensor that a piece has made, if it is returned."""
        for position in self._positions[microbatch].get(name, ()):
            if position not in self._summed:
                self.kept[microbatch][position] = tensor
            elif position in self.sums:
                self.sums[position] = tf.add(self.sums[position], tensor)
            else:
                self.sums[position] = tensor


def positions_of(names: Sequence[str], *, without: Collection[int] = frozenset()) -> dict[str, list[int]]:
    """Where each tensor is returned: one may be returned twice."""
    found: dict[str, list[int]] = {}
    for position, name in enumerate(names):
        if position not in without:
            found.setdefault(name, []).append(position)
    return found


@dataclass(slots=True)
class Store:
    """The tensors of one microbatch on this rank.

    Attributes:
        uses: how many pieces and messages will still take each of the others.
        constants: names of those that are alike in all microbatches of the program.
        shared: the constants, in one dictionary for all these microbatches.
        tensors: what pieces made, and other ranks sent.
    """

    arguments: dict[str, Any]
    uses: dict[str, int]
    constants: frozenset[str] = frozenset()
    shared: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, Any] = field(default_factory=dict)

    def take(self, name: str) -> Any:
        """A tensor; it is let go of with its last use."""
        if name in self.arguments:
            return self.arguments[name]
        if name not in self.tensors and name in self.shared:
            return self.shared[name]
        self.uses[name] -= 1
        return self.tensors[name] if self.uses[name] else self.tensors.pop(name)

    def take_in(self, name: str, tensor: Any) -> None:
        """Keeps a tensor that another rank has sent."""
        if name in self.constants:
            self.shared[name] = tensor
        else:
            self.keep(name, tensor)

    def keep(self, name: str, tensor: Any) -> None:
        """Keeps a tensor, if it has a use."""
        if self.uses.get(name):
            self.tensors[name] = tensor


@dataclass(slots=True, kw_only=True)
class PieceStage:
    """See `shardwright.runtime.action_loop.Stage`.

    Attributes:
        messages: where other ranks' tensors come in.
        results: where outputs of the step function go.
    """

    number: int
    programs: Sequence[Program]
    stores: Sequence[Store]
    messages: Messages
    results: Results

    def forward(self, microbatch: int) -> None:
        """Runs the forward piece."""
        self._run("forward", microbatch)

    def backward(self, microbatch: int, *, is_last: bool) -> None:
        """Runs the whole backward piece."""
        self._run("backward", microbatch)

    def backward_input(self, microbatch: int) -> None:
        """Runs the part of the backward piece that earlier stages wait for."""
        self._run("inputs", microbatch)

    def backward_weight(self, microbatch: int, *, is_last: bool) -> None:
        """Runs the rest of it."""
        self._run("weights", microbatch)

    def offload(self, microbatch: int) -> None:
        """Refused: `Program.offloads` names no stage."""
        raise ScheduleError("a stage of TensorFlow keeps its activations where they are.")

    def load(self, microbatch: int) -> None:
        """Refused, as `offload` is."""
        self.offload(microbatch)

    def to_send(self, microbatch: int, crossing: Crossing) -> Any:
        """A value that the stage has made."""
        return self.stores[microbatch].take(self.programs[microbatch].name_of(crossing))

    def gradient_to_send(self, microbatch: int, crossing: Crossing) -> Any:
        """A gradient that the stage has made."""
        return self.stores[microbatch].take(self.programs[microbatch].name_of(crossing))

    def _run(self, part: Part, microbatch: int) -> None:
        program, store = self.programs[microbatch], self.stores[microbatch]
        back = part != "forward"
        work = program.work(part, self.number)
        for crossing, name in work.arriving:
            store.take_in(name, self.messages.receive(microbatch, crossing, is_gradient=back))
        piece = work.piece
        if piece is None:
            return
        made = piece.run([store.take(name) for name in piece.feeds])
        for name, tensor in zip(piece.gives, made, strict=False):
            self.results.take(microbatch, name, tensor)
            store.keep(name, tensor)

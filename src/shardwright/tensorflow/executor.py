"""Runs one batch on one pipeline rank: all its microbatches, through the rank's stages.

::

    what other stages made ─▶ forward piece ─▶ sent on
                                  │ saved
    gradients that came in ─▶ backward piece ─▶ sent back, and gradients of this stage's variables
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tensorflow as tf
import torch

from shardwright.comm.transport import Transport
from shardwright.errors import ScheduleError
from shardwright.run.memory import memory_in_use
from shardwright.runtime.action_loop import MeasuredRow, Messages, run_actions
from shardwright.runtime.homes import Crossing
from shardwright.schedule import Kind, Schedule
from shardwright.tensorflow.channels import TensorChannels
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
class _PieceStage:
    """See `shardwright.runtime.action_loop.Stage`.

    Attributes:
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
        return self.stores[microbatch].take(self.programs[microbatch].name_of(crossing))

    def gradient_to_send(self, microbatch: int, crossing: Crossing) -> Any:
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


_PARTS: Mapping[Kind, Part] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "inputs",
    Kind.BACKWARD_WEIGHT: "weights",
}


@dataclass(frozen=True, slots=True)
class _Course:
    """What is the same for all batches of a kind.

    Attributes:
        given: what it was made from; held, so that no id is used again.
        programs: of each microbatch. Each brings constants in its first microbatch alone; that one runs
            first.
        uses: how often this rank's actions take each tensor of each microbatch.
        positions: of the outputs that are not summed, in each microbatch.
        summed: positions of the outputs whose sums this rank's pieces add to.
    """

    given: tuple[Sequence[Program], Schedule]
    programs: Sequence[Program]
    uses: Sequence[Mapping[str, int]]
    positions: Sequence[Mapping[str, Sequence[int]]]
    summed: Sequence[int]


class Executor:
    """Runs batches on one pipeline rank.

    Attributes:
        row: when this rank did what in the batch before.
    """

    def __init__(self, transport: Transport, device: torch.device):
        self.row = MeasuredRow()
        self._transport = transport
        self._device = device
        self._courses: dict[tuple[int, ...], _Course] = {}

    def run(
        self,
        programs: Sequence[Program],
        schedule: Schedule,
        parts: Sequence[Sequence[Any]],
        *,
        watch_memory: bool = False,
    ) -> Results:
        """Runs all microbatches."""
        course = self._course(programs, schedule)
        programs = course.programs
        messages = Messages(TensorChannels(self._transport, self._device), programs)
        results = Results(course.positions)
        rank, pieces = programs[0].rank, programs[0].pieces
        shared: dict[int, dict[str, Any]] = {}
        stores = [
            Store(
                dict(zip(program.graph.arguments, part, strict=True)),
                dict(used),
                constants=program.constants,
                shared=shared.setdefault(id(program.graph), {}),
            )
            for program, part, used in zip(programs, parts, course.uses, strict=True)
        ]
        stages = {
            number: _PieceStage(
                number=number, programs=programs, stores=stores, messages=messages, results=results
            )
            for number, owner in enumerate(schedule.stage_ranks)
            if owner == rank
        }
        pieces.sums.begin(course.summed, pieces.specs)
        in_use = partial(memory_in_use, self._device) if watch_memory else None
        self.row = run_actions(schedule, rank, stages, messages, bytes_in_use=in_use)
        self._transport.flush()
        results.sums.update(pieces.sums.taken(course.summed, pieces.specs))
        return results

    def _course(self, programs: Sequence[Program], schedule: Schedule) -> _Course:
        key = id(schedule), *map(id, programs)
        if key not in self._courses:
            self._courses[key] = _course_of(programs, schedule)
        return self._courses[key]


def _course_of(programs: Sequence[Program], schedule: Schedule) -> _Course:
    seen: set[int] = set()
    found = []
    for program in programs:
        found.append(program.again() if id(program) in seen else program)
        seen.add(id(program))
    actions = schedule.actions[programs[0].rank]
    keys = {(_PARTS[action.kind], action.stage) for action in actions if action.kind in _PARTS}
    return _Course(
        given=(programs, schedule),
        programs=found,
        uses=_uses(found, schedule),
        positions=[positions_of(each.graph.outputs, without=each.graph.sums) for each in found],
        summed=programs[0].pieces.summed(keys),
    )


def _uses(programs: Sequence[Program], schedule: Schedule) -> list[Counter[str]]:
    """How often the actions of this rank take each tensor of each microbatch."""
    uses: list[Counter[str]] = [Counter() for _ in programs]
    for action in schedule.actions[programs[0].rank]:
        program, used = programs[action.microbatch], uses[action.microbatch]
        if action.kind in _PARTS:
            piece = program.work(_PARTS[action.kind], action.stage).piece
            used.update(() if piece is None else piece.feeds)
        elif action.kind in (Kind.SEND_F, Kind.SEND_B):
            assert action.peer is not None
            routes = program.crossings if action.kind is Kind.SEND_F else program.gradients
            group = routes.get((action.stage, action.peer), ())
            used.update(program.name_of(crossing) for crossing in group)
    return uses

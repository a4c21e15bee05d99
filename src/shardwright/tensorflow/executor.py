"""Runs one batch on one pipeline rank: all its microbatches, through the rank's stages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from shardwright.comm.transport import Transport
from shardwright.run.memory import memory_in_use
from shardwright.runtime.action_loop import MeasuredRow, run_actions
from shardwright.runtime.messages import Messages
from shardwright.schedule import Kind, Schedule
from shardwright.tensorflow.channels import TensorChannels
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.routes import Part
from shardwright.tensorflow.stage import PieceStage, Results, Store, positions_of

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
            number: PieceStage(
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

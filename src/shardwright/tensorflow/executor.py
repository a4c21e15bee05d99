"""Runs one batch on one pipeline rank: all its microbatches, through the rank's stages."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardwright.comm.messages.transport import Transport
from shardwright.runtime.action_loop import MeasuredRow, run_actions
from shardwright.runtime.messages import Messages
from shardwright.schedule import Kind, Schedule
from shardwright.tensorflow.channels import TensorChannels
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.results import Results
from shardwright.tensorflow.routes import Part
from shardwright.tensorflow.stage import PieceStage, Store

__all__ = ["Executor"]

_PARTS: Mapping[Kind, Part] = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "inputs",
    Kind.BACKWARD_WEIGHT: "weights",
}


class Executor:
    """Runs batches on one pipeline rank.

    Args:
        transport: messages to the other ranks of the pipeline.
        device: where received tensors are put.

    Attributes:
        row: when this rank did what in the batch before.
    """

    def __init__(self, transport: Transport, device: torch.device):
        self.row = MeasuredRow()
        self._transport = transport
        self._device = device

    def run(
        self,
        programs: Sequence[Program],
        schedule: Schedule,
        parts: Sequence[Sequence[Any]],
        *,
        summed: frozenset[int],
    ) -> Results:
        """Runs all microbatches.

        Args:
            programs: of each microbatch.
            schedule: of the batch.
            parts: arguments of each microbatch.
            summed: positions of the outputs that are summed over the microbatches.
        """
        programs = _without_repeats(programs)
        messages = Messages(TensorChannels(self._transport, self._device), programs)
        results = Results([p.graph.outputs for p in programs], summed=summed)
        rank = programs[0].rank
        uses = _uses(programs, schedule)
        shared: dict[int, dict[str, Any]] = {}
        stores = [
            Store(
                dict(zip(program.graph.arguments, part, strict=True)),
                uses=used,
                constants=program.constants,
                shared=shared.setdefault(id(program.graph), {}),
            )
            for program, part, used in zip(programs, parts, uses, strict=True)
        ]
        stages = {
            number: PieceStage(
                number=number, programs=programs, stores=stores, messages=messages, results=results
            )
            for number, owner in enumerate(schedule.stage_ranks)
            if owner == rank
        }
        self.row = run_actions(schedule, rank, stages, messages)
        self._transport.flush()
        return results


def _without_repeats(programs: Sequence[Program]) -> list[Program]:
    """The programs, each of which brings constants in its first microbatch alone; that one runs first."""
    seen: set[int] = set()
    found = []
    for program in programs:
        found.append(program.again() if id(program) in seen else program)
        seen.add(id(program))
    return found


def _uses(programs: Sequence[Program], schedule: Schedule) -> list[Counter[str]]:
    """How often the actions of this rank take each tensor of each microbatch."""
    uses: list[Counter[str]] = [Counter() for _ in programs]
    for action in schedule.actions[programs[0].rank]:
        program, used = programs[action.microbatch], uses[action.microbatch]
        if action.kind in _PARTS:
            piece = program.piece(_PARTS[action.kind], action.stage)
            used.update(() if piece is None else piece.feeds)
        elif action.kind in (Kind.SEND_F, Kind.SEND_B):
            assert action.peer is not None
            routes = program.crossings if action.kind is Kind.SEND_F else program.gradients
            group = routes.get((action.stage, action.peer), ())
            used.update(program.name_of(crossing) for crossing in group)
    return uses

"""Runs one batch on one pipeline rank: all its microbatches, through the rank's stages."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from shardwright.comm.messages.transport import Transport
from shardwright.comm.trust.value_board import ValueBoard
from shardwright.runtime.action_loop import MeasuredRow, run_actions
from shardwright.runtime.messages import Messages
from shardwright.schedule import Kind, Schedule
from shardwright.torch.backward.split_backward import allow_split
from shardwright.torch.batch.batch import Batch
from shardwright.torch.execution.autograd_stage import AutogradStage
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatch import Microbatch
from shardwright.torch.execution.own_attributes import OwnAttributes
from shardwright.torch.execution.reading_microbatch import ReadingMicrobatch
from shardwright.torch.execution.tensor_channels import TensorChannels
from shardwright.torch.program.instructions import Place
from shardwright.torch.program.program import Program, generators_of
from shardwright.torch.pytorch.memory_in_use import memory_in_use
from shardwright.torch.randomness.rng import GeneratorState, run_ahead, set_state
from shardwright.torch.tracing.glue_buffers import GlueBuffers
from shardwright.torch.tracing.recomputed_statistics import RecomputedStatistics

__all__ = ["Executor"]


class Executor:
    """Runs batches on one pipeline rank.

    Args:
        transport: messages to the other ranks of the pipeline.
        device: where received tensors are put.
        on_backward: called with a stage when a backward of it begins and when it has ended: see
            `GradientReducer.on_backward`.

    Attributes:
        row: when this rank did what in the batch before.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        device: torch.device,
        on_backward: Callable[..., None] | None = None,
    ):
        self.row = MeasuredRow()
        self._transport = transport
        self._device = device
        self._on_backward = on_backward

    def run(
        self,
        schedule: Schedule,
        rank: int,
        programs: Sequence[Program],
        function: Callable[..., Any],
        parts: Sequence[Batch],
        *,
        board: ValueBoard,
        loss_scale: float,
        model: nn.Module,
        buffers: GlueBuffers | None,
        watch_memory: bool,
    ) -> list[Returned]:
        """Runs all microbatches.

        Args:
            schedule: lowered actions of all ranks.
            rank: this pipeline rank.
            programs: the program of each microbatch.
            function: the step function.
            parts: the microbatches.
            board: where ranks put up values that a `ReadingStep` reads.
            loss_scale: factor on the gradient of the loss: 1 / microbatches for a mean.
            model: the model.
            buffers: its buffers, for step functions that change them between modules.
            watch_memory: look after each action how much is in use.

        Returns:
            What the step function returned for each microbatch.
        """
        attributes = OwnAttributes(programs) if any(program.attributes for program in programs) else None
        messages = Messages(TensorChannels(self._transport, self._device), programs)
        make = partial(
            ReadingMicrobatch,
            board=board,
            device=self._device,
            parameters=cache(partial(_parameters_of, model)),
            model=model,
            buffers=buffers,
            attributes=attributes,
        )
        microbatches = [
            make(index, program, function, part.arguments, messages.receive)
            for index, (program, part) in enumerate(zip(programs, parts, strict=True))
        ]
        final_state = self._run_generators_ahead(programs, microbatches)
        stages = self._stages(schedule, rank, microbatches, messages, loss_scale=loss_scale, model=model)
        try:
            self.row = run_actions(
                schedule,
                rank,
                stages,
                messages,
                other_waits_s=lambda: board.waited_s,
                bytes_in_use=partial(memory_in_use, self._device) if watch_memory else None,
            )
            returned = [microbatch.finish() for microbatch in microbatches]
            board.done()
            self._transport.flush()
            if attributes is not None:
                attributes.finish()
            if final_state is not None:
                set_state(final_state, self._device, generators_of(programs))
        finally:
            allow_split(True)
            for microbatch in microbatches:
                microbatch.close()
        return returned

    def _stages(
        self,
        schedule: Schedule,
        rank: int,
        microbatches: Sequence[Microbatch],
        messages: Messages,
        *,
        loss_scale: float,
        model: nn.Module,
    ) -> dict[int, AutogradStage]:
        """The stages of this rank, for this batch."""
        split = {(a.stage, a.microbatch) for a in schedule.actions[rank] if a.kind is Kind.BACKWARD_INPUT}
        repeated = [microbatch.program.repeated_buffers for microbatch in microbatches]
        statistics = RecomputedStatistics(model, repeated) if any(repeated) else None
        return {
            number: AutogradStage(
                number=number,
                microbatches=microbatches,
                messages=messages,
                split=frozenset(microbatch for stage, microbatch in split if stage == number),
                loss_scale=loss_scale,
                device=self._device,
                on_backward=self._on_backward,
                statistics=statistics,
            )
            for number, owner in enumerate(schedule.stage_ranks)
            if owner == rank
        }

    def _run_generators_ahead(
        self, programs: Sequence[Program], microbatches: Sequence[Microbatch]
    ) -> GeneratorState | None:
        """Gives every microbatch the random numbers of a plain loop; None where nothing is drawn."""
        if not any(program.draws for program in programs):
            return None
        steps = [
            [(i.draws, i.place is not Place.ELSEWHERE) for i in program.instructions] for program in programs
        ]
        generators = generators_of(programs)
        turns, final = run_ahead(steps, self._device, generators)
        for microbatch, own in zip(microbatches, turns, strict=True):
            microbatch.generators.run_ahead(own, generators)
        return final


def _parameters_of(model: nn.Module) -> frozenset[int]:
    """Identities; a parameter may be registered as a buffer."""
    tensors = (*model.parameters(), *model.buffers())
    return frozenset(id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter))

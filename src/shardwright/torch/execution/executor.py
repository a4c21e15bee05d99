"""Walks a rank's actions of a batch, and the tensors that these send and receive."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.joining.store import ValueBoard
from shardwright.comm.transport import Receipt, Transport
from shardwright.run.context import Context
from shardwright.run.memory import memory_in_use
from shardwright.runtime import action_loop as messages
from shardwright.runtime.action_loop import MeasuredRow, Messages, run_actions
from shardwright.runtime.batch_schedules import (
    BatchSchedules,
    check_one_order,
    homes_of_buffers,
)
from shardwright.runtime.homes import Crossing
from shardwright.schedule import Kind
from shardwright.torch._private.modules import is_profiled
from shardwright.torch.backward.split_backward import allow_split
from shardwright.torch.batch.batch import Batch
from shardwright.torch.execution.agreement import TrainedModel
from shardwright.torch.execution.autograd_stage import AutogradStage
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.execution.microbatches.microbatch import Microbatch
from shardwright.torch.execution.microbatches.microbatch_state import OwnAttributes
from shardwright.torch.execution.microbatches.microbatch_tensors import MicrobatchTensors
from shardwright.torch.execution.microbatches.rank_microbatch import SharedByMicrobatches
from shardwright.torch.execution.replay.replay import Replay
from shardwright.torch.offload.offloading import Offloading, lasting_storages, storages_of
from shardwright.torch.program.instructions import Place
from shardwright.torch.program.program import Program, generators_of
from shardwright.torch.pytorch.modules import range_named
from shardwright.torch.pytorch.tensors import Order, from_memory_order, in_memory_order
from shardwright.torch.randomness import GeneratorState, run_ahead, set_state
from shardwright.torch.tracing.together import GlueBuffers


def number_of_parts(context: Context, model: TrainedModel, batch: Batch, wanted: int) -> int:
    """Into how many microbatches a batch is cut, where it is smaller than the first: the last of a loader.

    Fewer than wanted change nothing where each counts by its samples.
    Replicas may work together in each microbatch, so that they need equally many.
    """
    if batch.in_one:
        return 1
    samples = batch.num_samples
    if not samples or context.mesh.data > 1 or not model.average_grads_across_microbatches:
        return wanted
    return min(wanted, samples)


class BatchKind:
    """What all batches have in common whose microbatches are run by the same programs: worked out once.

    Attributes:
        state: changed buffers of the model -> rank that has them.
        draws, python_draws: random numbers are drawn; Python's are.
        has_attributes: attributes that are read between units change in a step.
        as_planned: all go through the ranks as the plan says.
    """

    def __init__(self, programs: Sequence[Program], schedules: BatchSchedules):
        check_one_order(programs)
        self.programs = tuple(programs)
        self.distinct = tuple({id(program): program for program in programs}.values())
        traces = [program.trace for program in self.distinct]
        self.trains = any(trace.backward_at is not None for trace in traces)
        self.schedule = schedules.of_batch(programs, trains=self.trains)
        self.state = homes_of_buffers(self.distinct)
        self.draws = any(program.draws for program in self.distinct)
        self.python_draws = any(trace.random.python_at for trace in traces)
        self.ends = any(trace.ends for trace in traces)
        self.changes_batch = any(trace.effects.changes_batch for trace in traces)
        self.has_attributes = any(trace.effects.attributes for trace in traces)
        self.as_planned = all(program.as_planned for program in self.distinct)
        self.flops = sum(program.flops for program in programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One batch, as one pipeline rank runs it.

    Attributes:
        board: where ranks put up values that a `ReadingStep` reads.
        buffers: those of the model that the step function changes between modules; None without any.
        watch_memory: look after each action how much is in use.
    """

    rank: int
    common: BatchKind
    function: Callable[..., Any]
    parts: Sequence[Batch]
    board: ValueBoard
    losses: LossWeights
    buffers: GlueBuffers | None
    watch_memory: bool

    @property
    def programs(self) -> Sequence[Program]:
        return self.common.programs


class TensorChannels:
    """See `shardwright.runtime.action_loop.Channels`."""

    def __init__(self, transport: Transport, device: torch.device):
        self._transport = transport
        self._device = device

    def post_receive(self, crossing: Crossing, source: int) -> messages.Receipt:
        """Announces that the next tensor from a rank can be taken."""
        dtype = getattr(torch, crossing.spec.dtype)
        receipt = self._transport.post_receive(
            crossing.message_shape, source, dtype=dtype, device=self._device
        )
        return receipt if crossing.order is None else _Reordered(receipt, crossing.order)

    def send(self, tensor: Tensor, crossing: Crossing, target: int) -> None:
        self._transport.send(in_memory_order(tensor, crossing.order), target)


class _Reordered:
    """A receive of a tensor whose dims are sent in the order of memory."""

    def __init__(self, receipt: Receipt, order: Order):
        self._receipt = receipt
        self._order = order

    def wait(self) -> Tensor:
        return from_memory_order(self._receipt.wait(), self._order)


class Executor:
    """Runs batches on one pipeline rank.

    Attributes:
        row: when this rank did what in the batch before.
        outside_s: seconds of operations that rest on no unit, and that every rank runs, in that batch.
    """

    def __init__(
        self,
        transport: Transport,
        model: nn.Module,
        *,
        device: torch.device,
        on_backward: Callable[..., None] | None = None,
        offloading: Offloading,
        replays: bool = True,
    ):
        self._replays = replays
        self.row = MeasuredRow()
        self.outside_s = 0.0
        self._transport = transport
        self._model = model
        self._device = device
        self._on_backward = on_backward
        self._offloading = offloading

    def run(self, batch: RankBatch) -> list[Returned]:
        """Runs all microbatches; returns what the step function returned for each."""
        programs, board = batch.programs, batch.board
        attributes = OwnAttributes(programs) if batch.common.has_attributes else None
        messages = Messages(TensorChannels(self._transport, self._device), programs)
        microbatches = self._microbatches(batch, messages, attributes)
        final_state = self._run_generators_ahead(batch, microbatches)
        self._offload(batch, microbatches)
        stages = self._stages(batch, microbatches, messages)
        try:
            self.row = run_actions(
                batch.common.schedule,
                batch.rank,
                stages,
                messages,
                other_waits_s=lambda: board.waited_s + self._offloading.waited_s,
                bytes_in_use=partial(memory_in_use, self._device) if batch.watch_memory else None,
                named=range_named if is_profiled() else None,
            )
            returned = [microbatch.finish() for microbatch in microbatches]
            self.outside_s = sum(microbatch.outside_s for microbatch in microbatches)
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
            self._offloading.end_batch()
        if self._replays:
            for program in batch.common.distinct:
                program.replay.end_batch()
        if batch.watch_memory:
            self.row.host_copies = self._offloading.copies()
        return returned

    def _microbatches(
        self, batch: RankBatch, messages: Messages, attributes: OwnAttributes | None
    ) -> list[Microbatch]:
        shared = SharedByMicrobatches(
            function=batch.function,
            receive=messages.receive,
            board=batch.board,
            device=self._device,
            parameters=cache(partial(_parameters_of, self._model)),
            model=self._model,
            buffers=batch.buffers,
            attributes=attributes,
            data=batch.losses.watch_data() if any(p.trace.ends for p in batch.common.distinct) else None,
        )
        if not self._replays:
            return [
                Microbatch(index, program, part.arguments, shared)
                for index, (program, part) in enumerate(zip(batch.programs, batch.parts, strict=True))
            ]
        from_list = {id(program): _replay_of(program).begin_batch() for program in batch.common.distinct}
        return [
            program.replay.microbatch(index, part, shared, from_list=from_list[id(program)])
            for index, (program, part) in enumerate(zip(batch.programs, batch.parts, strict=True))
        ]

    def _stages(
        self, batch: RankBatch, microbatches: Sequence[Microbatch], messages: Messages
    ) -> dict[int, AutogradStage]:
        row = batch.common.schedule.actions[batch.rank]
        split = {(a.stage, a.microbatch) for a in row if a.kind is Kind.BACKWARD_INPUT}
        return {
            number: AutogradStage(
                number=number,
                microbatches=microbatches,
                messages=messages,
                split=frozenset(microbatch for stage, microbatch in split if stage == number),
                losses=batch.losses,
                device=self._device,
                on_backward=self._on_backward,
            )
            for number, owner in enumerate(batch.common.schedule.stage_ranks)
            if owner == batch.rank
        }

    def _offload(self, batch: RankBatch, microbatches: Sequence[Microbatch]) -> None:
        self._offloading.begin_batch()
        row = batch.common.schedule.actions[batch.rank]
        offloads = [action for action in row if action.kind is Kind.OFFLOAD]
        if not offloads:
            return
        lasting = lasting_storages(self._model, (part.arguments for part in batch.parts))
        for action in offloads:
            running = microbatches[action.microbatch]
            running.offloads[action.stage] = self._offloading.stage(
                action.stage, action.microbatch, partial(_needed, lasting, running.tensors)
            )

    def _run_generators_ahead(
        self, batch: RankBatch, microbatches: Sequence[Microbatch]
    ) -> GeneratorState | None:
        """Gives every microbatch the random numbers of a plain loop; None where nothing is drawn."""
        if not batch.common.draws:
            return None
        programs = batch.programs
        steps = [
            [(i.step.draws, i.place is not Place.ELSEWHERE) for i in program.instructions]
            for program in programs
        ]
        generators = generators_of(programs)
        turns, final = run_ahead(steps, self._device, generators)
        for microbatch, own in zip(microbatches, turns, strict=True):
            microbatch.generators.run_ahead(own, generators)
        return final


def _replay_of(program: Program) -> Replay:
    if program.replay is None:
        program.replay = Replay(program)
    replay: Replay = program.replay
    return replay


def _needed(lasting: set[int], tensors: MicrobatchTensors) -> set[int]:
    """The storages that stay whether or not autograd keeps them."""
    return lasting | storages_of((*tensors.leaves.values(), *tensors.values.values(), *tensors.held.values()))


def _parameters_of(model: nn.Module) -> frozenset[int]:
    """The ids of all parameters; one may be registered as a buffer."""
    tensors = (*model.parameters(), *model.buffers())
    return frozenset(id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter))

"""Walks the action list of a rank: computes, sends, receives.

::

    RECV_F 1,0    post a buffer                     1RECV_F0  1RECV_F1  1F0  1SEND_F0 ...
    F 1,0         run the step function on          ───────────────────────────────────▶ time
                  microbatch 0 through stage 1
    B 1,0         autograd from what stage 1 sent, with the gradients that came back
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.comm.transport import Receipt, Transport
from shardwright.comm.value_board import ValueBoard
from shardwright.errors import TraceMismatchError
from shardwright.runtime.crossings import Crossing
from shardwright.schedule import Action, Kind, Schedule
from shardwright.torch._private import run_backward
from shardwright.torch.backward.split_backward import allow_split, count_uses, put_off_weights
from shardwright.torch.execution.exchange import Returned
from shardwright.torch.execution.microbatch import Microbatch
from shardwright.torch.execution.own_attributes import OwnAttributes
from shardwright.torch.execution.reading_microbatch import ReadingMicrobatch
from shardwright.torch.program.instructions import Place
from shardwright.torch.program.program import Program, generators_of
from shardwright.torch.pytorch.layout import from_memory_order, in_memory_order
from shardwright.torch.pytorch.memory_in_use import memory_in_use
from shardwright.torch.randomness.rng import GeneratorState, run_ahead, set_state
from shardwright.torch.tracing.glue_buffers import GlueBuffers
from shardwright.torch.tracing.recomputed_statistics import RecomputedStatistics

__all__ = ["Executor", "Timeline"]


@dataclass(slots=True)
class Timeline:
    """When each action ran.

    Attributes:
        events: (action, start, end, time spent waiting for messages), seconds on `time.perf_counter`.
        memory: bytes in use when each of them ended; empty where nobody asked.
    """

    events: list[tuple[Action, float, float, float]] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)

    @property
    def busy_s(self) -> float:
        """Seconds of computing, waiting left out."""
        return sum(end - start - waited for _, start, end, waited in self.events)


class Executor:
    """Runs one batch on one pipeline rank.

    Args:
        transport: messages to the other ranks of the pipeline.
        device: where received tensors are put.
        on_backward: called with a stage when a backward of it begins and when it has ended: see
            `GradientReducer.on_backward`.
    """

    def __init__(
        self,
        transport: Transport,
        *,
        device: torch.device,
        on_backward: Callable[..., None] | None = None,
    ):
        self._transport = transport
        self._device = device
        self._on_backward = on_backward
        self._inbox: dict[tuple[int, int, int, bool], Receipt] = {}
        self._waited_s = 0.0
        self._watches_memory = False
        self._board: ValueBoard | None = None
        self._results: list[Returned] = []
        self.timeline = Timeline()

    def run(
        self,
        schedule: Schedule,
        rank: int,
        programs: Sequence[Program],
        function: Callable[..., Any],
        arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]],
        *,
        loss_scale: float = 1.0,
        model: nn.Module | None = None,
        buffers: GlueBuffers | None = None,
        watch_memory: bool = False,
        board: ValueBoard | None = None,
    ) -> list[Returned]:
        """Runs all microbatches.

        Args:
            schedule: lowered actions of all ranks.
            rank: this pipeline rank.
            programs: the program of each microbatch.
            function: the step function.
            arguments: (args, kwargs) of each microbatch.
            loss_scale: factor on the gradient of the loss: 1 / microbatches for a mean.
            model: the model, for step functions that register hooks on it.
            buffers: its buffers, for step functions that change them between modules.
            watch_memory: look after each action how much is in use.
            board: where ranks put up values that a `ReadingStep` reads.

        Returns:
            What the step function returned for each microbatch.
        """
        self._begin(schedule, rank, loss_scale=loss_scale)
        self._watches_memory = watch_memory
        self._board = board
        attributes = OwnAttributes(programs) if any(program.attributes for program in programs) else None
        settings: dict[str, Any] = {
            "device": self._device,
            "parameters": cache(lambda: frozenset() if model is None else _parameters_of(model)),
            "model": model,
            "buffers": buffers,
            "attributes": attributes,
        }
        make: Callable[..., Microbatch] = partial(Microbatch, **settings)
        if board is not None:
            make = partial(ReadingMicrobatch, board=board, **settings)
        self._microbatches = [
            make(index, program, function, args, self._receive_value)
            for index, (program, args) in enumerate(zip(programs, arguments, strict=True))
        ]
        final_state = self._run_generators_ahead(programs)
        self._statistics = None
        repeated = [program.repeated_buffers for program in programs]
        if model is not None and any(repeated):
            self._statistics = RecomputedStatistics(model, repeated)
        try:
            for action in schedule.actions[rank]:
                self._act(action)
            for microbatch in self._microbatches:
                self._finish(microbatch)
            if board is not None:
                board.done()
            self._transport.flush()
            if attributes is not None:
                attributes.finish()
            if final_state is not None:
                set_state(final_state, self._device, generators_of(programs))
        finally:
            allow_split(True)
            for microbatch in self._microbatches:
                microbatch.close()
            self._microbatches.clear()
        results, self._results = self._results, []
        return results

    def _begin(self, schedule: Schedule, rank: int, *, loss_scale: float) -> None:
        """Sets back what is kept for one batch."""
        self._inbox.clear()
        self.timeline = Timeline()
        self._loss_scale = loss_scale
        self._gradients_left = dict.fromkeys(range(schedule.num_stages), schedule.num_microbatches)
        self._put_off: dict[tuple[int, int], list[Callable[[], None]]] = {}
        self._split = {
            (action.stage, action.microbatch)
            for action in schedule.actions[rank]
            if action.kind is Kind.BACKWARD_INPUT
        }
        self._results = []

    def _run_generators_ahead(self, programs: Sequence[Program]) -> GeneratorState | None:
        """Gives every microbatch the random numbers of a plain loop; None where nothing is drawn."""
        if not any(program.draws for program in programs):
            return None
        steps = [
            [(i.draws, i.place is not Place.ELSEWHERE) for i in program.instructions] for program in programs
        ]
        generators = generators_of(programs)
        turns, final = run_ahead(steps, self._device, generators)
        for microbatch, own in zip(self._microbatches, turns, strict=True):
            microbatch.generators.run_ahead(own, generators)
        return final

    def _act(self, action: Action) -> None:
        kind = action.kind
        microbatch = self._microbatches[action.microbatch]
        if kind is Kind.RECV_F or kind is Kind.RECV_B:
            self._post(action, microbatch)
            return
        if kind is Kind.SEND_F or kind is Kind.SEND_B:
            self._send(action, microbatch)
            return
        start = time.perf_counter()
        self._waited_s = 0.0
        if self._board is not None:
            self._board.waited_s = 0.0
        if self._statistics is None:
            self._compute(action, microbatch)
        else:
            with self._statistics.updated(forward=kind is Kind.FORWARD):
                self._compute(action, microbatch)
        if self._board is not None:
            self._waited_s += self._board.waited_s
        self.timeline.events.append((action, start, time.perf_counter(), self._waited_s))
        if self._watches_memory:
            self.timeline.memory.append(memory_in_use(self._device))

    def _compute(self, action: Action, microbatch: Microbatch) -> None:
        kind = action.kind
        # For the forward, and for the one that a backward repeats.
        allow_split((action.stage, action.microbatch) in self._split)
        if kind is Kind.FORWARD:
            count_uses(microbatch.uses)
            microbatch.forward(action.stage)
        elif kind is Kind.BACKWARD_WEIGHT:
            self._backward_weight(action.stage, microbatch)
        else:
            self._backward(action.stage, microbatch, split=kind is Kind.BACKWARD_INPUT)

    # ---- transfers ----

    def _post(self, action: Action, microbatch: Microbatch) -> None:
        """Posts the receives of all values of one edge; `action.stage` is the stage that receives."""
        assert action.peer is not None
        backward = action.kind is Kind.RECV_B
        edge = (action.stage, action.peer) if backward else (action.peer, action.stage)
        source = microbatch.program.stage_ranks[action.peer]
        for crossing in microbatch.program.crossings.get(edge, ()):
            if backward and not crossing.has_gradient:
                continue
            self._inbox[microbatch.index, crossing.value, crossing.target, backward] = (
                self._transport.post_receive(
                    crossing.message_shape,
                    source,
                    dtype=getattr(torch, crossing.spec.dtype),
                    device=self._device,
                )
            )

    def _send(self, action: Action, microbatch: Microbatch) -> None:
        """Sends all values of one edge, or their gradients; `action.stage` is the stage that sends."""
        assert action.peer is not None
        backward = action.kind is Kind.SEND_B
        edge = (action.peer, action.stage) if backward else (action.stage, action.peer)
        target = microbatch.program.stage_ranks[action.peer]
        for crossing in microbatch.program.crossings.get(edge, ()):
            if not backward:
                tensor = microbatch.to_send(crossing)
            elif crossing.has_gradient:
                tensor = microbatch.tensors.gradients.pop((crossing.value, crossing.target))
            else:
                continue
            self._transport.send(in_memory_order(tensor, crossing.order), target)

    def _receive(self, microbatch: int, crossing: Crossing, *, backward: bool) -> Tensor:
        receipt = self._inbox.pop((microbatch, crossing.value, crossing.target, backward))
        start = time.perf_counter()
        tensor = receipt.wait()
        self._waited_s += time.perf_counter() - start
        return from_memory_order(tensor, crossing.order)

    def _receive_value(self, microbatch: int, crossing: Crossing) -> Tensor:
        return self._receive(microbatch, crossing, backward=False)

    # ---- backward ----

    def _backward(self, stage: int, microbatch: Microbatch, *, split: bool) -> None:
        program = microbatch.program
        trains = microbatch.come_to_backward()
        roots, gradients = self._roots(stage, microbatch, trains=trains)
        last = not split and self._is_last(stage)
        if not split and self._on_backward:
            self._on_backward(stage, begins=True, last=last)
        if roots:
            recomputes = program.recomputes or microbatch.is_behind_end
            again = microbatch.running_again(stage) if recomputes else nullcontext()
            with again, microbatch.as_left(stage):
                if split:
                    with put_off_weights(root.grad_fn for root in roots) as work:
                        run_backward(roots, gradients)
                    self._put_off[stage, microbatch.index] = work
                else:
                    run_backward(roots, gradients)
        if not split and self._on_backward:
            self._on_backward(stage, begins=False, last=last)
        for crossing in program.receives[stage]:
            leaf = microbatch.tensors.leaves.get((crossing.value, stage))
            if crossing.has_gradient:
                microbatch.tensors.gradients[crossing.value, stage] = _gradient_of(
                    leaf, crossing, self._device
                )
            if crossing.detached and leaf is not None and leaf.grad is not None:
                raise TraceMismatchError(
                    "in the trace no unit of this stage gave a gradient to a tensor of another stage "
                    f"(shape {crossing.spec.shape}), and in microbatch {microbatch.index} one does. Detach "
                    "it in all microbatches or in none."
                )
            if leaf is not None and leaf.requires_grad:
                leaf.grad = None
            if leaf is None or crossing.value in program.read_late:
                continue
            del microbatch.tensors.leaves[crossing.value, stage]
            if leaf.requires_grad:
                # The loss, which the step function holds on to, leads through the graph to this leaf.
                leaf.data = leaf.new_empty(0)
        self._free(stage, microbatch)
        microbatch.backward_ran()

    def _backward_weight(self, stage: int, microbatch: Microbatch) -> None:
        last = self._is_last(stage)
        if self._on_backward:
            self._on_backward(stage, begins=True, last=last, whole=False)
        for work in self._put_off.pop((stage, microbatch.index), ()):
            work()
        if self._on_backward:
            self._on_backward(stage, begins=False, last=last, whole=False)

    def _is_last(self, stage: int) -> bool:
        """Whether this ``B`` or ``W`` is the last that adds to the gradients of a stage."""
        self._gradients_left[stage] -= 1
        return self._gradients_left[stage] == 0

    def _roots(
        self, stage: int, microbatch: Microbatch, *, trains: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """What autograd starts from: the tensors that this stage sent, with their gradients, and the loss.

        Args:
            stage: whose backward it is.
            microbatch: the microbatch.
            trains: it has a backward; else gradients are taken in alone.
        """
        program = microbatch.program
        gradients: dict[int, Tensor] = {}
        for crossing in program.sends[stage]:
            if not crossing.has_gradient:
                continue
            if program.stage_ranks[crossing.target] == program.stage_ranks[stage]:
                gradient = microbatch.tensors.gradients.pop((crossing.value, crossing.target))
            else:
                gradient = self._receive(microbatch.index, crossing, backward=True)
            known = gradients.get(crossing.value)
            gradients[crossing.value] = gradient if known is None else known + gradient
        if not trains:
            return [], []
        values = microbatch.tensors.values
        pairs = [(values[value], gradient) for value, gradient in gradients.items() if value in values]
        if stage == program.loss_stage:
            loss = microbatch.loss
            assert loss is not None
            given = microbatch.loss_gradient
            scale = torch.ones_like(loss) if given is None else given
            pairs.append((loss, scale * self._loss_scale))
        # A view that was made under no_grad says that it requires gradients when its base does.
        pairs = [
            (tensor, gradient)
            for tensor, gradient in pairs
            if tensor.requires_grad and not (tensor._is_view() and tensor.grad_fn is None)
        ]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def _free(self, stage: int, microbatch: Microbatch) -> None:
        """Drops what the stage kept for this microbatch, but for what the step function returns."""
        program = microbatch.program
        for kept in (microbatch.tensors.values, microbatch.tensors.held):
            for value in [v for v in kept if program.home_of[v] == stage and v not in program.kept]:
                del kept[value]

    def _finish(self, microbatch: Microbatch) -> None:
        self._results.append(microbatch.finish())


def _parameters_of(model: nn.Module) -> frozenset[int]:
    """Identities; a parameter may be registered as a buffer."""
    tensors = (*model.parameters(), *model.buffers())
    return frozenset(id(tensor) for tensor in tensors if isinstance(tensor, nn.Parameter))


def _gradient_of(leaf: Tensor | None, crossing: Crossing, device: torch.device) -> Tensor:
    if leaf is not None and leaf.grad is not None:
        return leaf.grad
    return torch.zeros(crossing.spec.shape, dtype=getattr(torch, crossing.spec.dtype), device=device)

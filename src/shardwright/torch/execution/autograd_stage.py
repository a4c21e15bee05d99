"""One stage of this rank: runs the step function forward and autograd backward.

::

    what other stages made           what this stage made
      leaf ──▶ units of this stage ──▶ value  ◀── gradient from the stages that read it
       │                               loss   ◀── 1 / microbatches
       ▼
    its gradient goes back
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.errors import TraceMismatchError
from shardwright.runtime.action_loop import Messages
from shardwright.runtime.homes import Crossing
from shardwright.torch._private.modules import run_backward
from shardwright.torch.backward.split_backward import allow_split, count_uses, put_off_weights
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.execution.microbatches.microbatch import Microbatch


@dataclass(slots=True, kw_only=True)
class AutogradStage:
    """See `shardwright.runtime.action_loop.Stage`.

    Attributes:
        split: the microbatches whose backward is split in two.
        losses: how much the loss of each microbatch counts.
        on_backward: called when a backward of the stage begins and when it has ended: see
            `GradientReducer.on_backward`.
    """

    number: int
    microbatches: Sequence[Microbatch]
    messages: Messages
    split: frozenset[int]
    losses: LossWeights
    device: torch.device
    on_backward: Callable[..., None] | None
    _put_off: dict[int, list[Callable[[], None]]] = field(default_factory=dict)

    # ---- driven by the loop ----

    def forward(self, microbatch: int) -> None:
        """Runs the step function up to the end of the stage."""
        running = self.microbatches[microbatch]
        self._prepare(microbatch)
        count_uses(running.uses)
        running.forward(self.number)

    def backward(self, microbatch: int, *, is_last: bool) -> None:
        running = self.microbatches[microbatch]
        self._prepare(microbatch)
        roots, gradients = self._roots(running)
        self._tell(begins=True, is_last=is_last, is_whole=True)
        if roots:
            with self._running_again(running), running.state.as_left(self.number):
                run_backward(roots, gradients)
        self._tell(begins=False, is_last=is_last, is_whole=True)
        self._end_backward(running)

    def backward_input(self, microbatch: int) -> None:
        """Runs autograd, and puts the gradients of weights off where a module can."""
        running = self.microbatches[microbatch]
        self._prepare(microbatch)
        roots, gradients = self._roots(running)
        if roots:
            with (
                self._running_again(running),
                running.state.as_left(self.number),
                put_off_weights(root.grad_fn for root in roots) as work,
            ):
                run_backward(roots, gradients)
            self._put_off[microbatch] = work
        self._end_backward(running)

    def backward_weight(self, microbatch: int, *, is_last: bool) -> None:
        """Computes what `backward_input` has put off."""
        self._prepare(microbatch)
        self._tell(begins=True, is_last=is_last, is_whole=False)
        for work in self._put_off.pop(microbatch, ()):
            work()
        self._tell(begins=False, is_last=is_last, is_whole=False)

    def offload(self, microbatch: int) -> None:
        """Has leave what the last unit has kept; the others have begun."""
        self.microbatches[microbatch].offloads[self.number].offload()

    def load(self, microbatch: int) -> None:
        """Has come back what the backward needs first."""
        self.microbatches[microbatch].offloads[self.number].load()

    def to_send(self, microbatch: int, crossing: Crossing) -> Tensor:
        """A value that the stage has made; zeros where the step function has left its program before."""
        running = self.microbatches[microbatch]
        values, boundary = running.tensors.values, running.program.boundary
        if crossing.value in values or not running.is_behind_end:
            value = values[crossing.value]
            return value if boundary is None else boundary.part(value)
        spec, shape = crossing.spec, crossing.part or crossing.spec.shape
        return torch.zeros(shape, dtype=getattr(torch, spec.dtype), device=self.device)

    def gradient_to_send(self, microbatch: int, crossing: Crossing) -> Tensor:
        """The gradient of a value that the stage has read."""
        running = self.microbatches[microbatch]
        gradient = running.tensors.gradients.pop((crossing.value, crossing.target))
        boundary = running.program.boundary
        return gradient if boundary is None else boundary.part(gradient)

    # ---- inside ----

    def _prepare(self, microbatch: int) -> None:
        # For the forward, and for the one that a backward repeats.
        allow_split(microbatch in self.split)

    def _tell(self, *, begins: bool, is_last: bool, is_whole: bool) -> None:
        """Tells who sums gradients over ranks that a backward begins, or has ended."""
        if self.on_backward is not None:
            self.on_backward(self.number, begins=begins, last=is_last, whole=is_whole)

    def _running_again(self, running: Microbatch) -> AbstractContextManager[None]:
        """Gives a forward that the backward repeats what it got at first."""
        recomputes = running.program.trace.recomputes or running.is_behind_end
        return running.running_again(self.number) if recomputes else nullcontext()

    def _roots(self, running: Microbatch) -> tuple[list[Tensor], list[Tensor]]:
        """The roots of the backward: the tensors that this stage sent, with their gradients, and the loss."""
        program = running.program
        trains = running.come_to_backward()
        gradients = self._gradients_of_sent(running)
        if not trains:
            return [], []
        values = running.tensors.values
        pairs = [(values[value], gradient) for value, gradient in gradients.items() if value in values]
        if self.number == program.loss_stage:
            loss = running.loss
            assert loss is not None
            given = running.loss_gradient
            factor = self.losses.factor(running.index, loss, form=program.trace.loss)
            if factor != 0:  # nothing in it counts: it may be NaN
                scale = torch.ones_like(loss) if given is None else given
                pairs.append((loss, scale * factor))
        # A view that was made under no_grad says that it requires gradients when its base does.
        pairs = [
            (tensor, gradient)
            for tensor, gradient in pairs
            if tensor.requires_grad and not (tensor._is_view() and tensor.grad_fn is None)
        ]
        return [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]

    def _gradients_of_sent(self, running: Microbatch) -> dict[int, Tensor]:
        """The gradients of what this stage made for others: value -> sum over the stages that read it."""
        program = running.program
        gradients: dict[int, Tensor] = {}
        for crossing in program.sent_from(self.number):
            if not crossing.has_gradient:
                continue
            if crossing.target in program.stages:
                gradient = running.tensors.gradients.pop((crossing.value, crossing.target))
            else:
                gradient = self.messages.receive(running.index, crossing, is_gradient=True)
                if program.boundary is not None:
                    gradient = program.boundary.joined(gradient, crossing.spec.shape, crossing.order)
            known = gradients.get(crossing.value)
            gradients[crossing.value] = gradient if known is None else known + gradient
        return gradients

    def _end_backward(self, running: Microbatch) -> None:
        """Keeps the gradients of what the stage read, and lets go of the rest."""
        for crossing in running.program.received_by(self.number):
            leaf = running.tensors.leaves.get((crossing.value, self.number))
            if crossing.has_gradient:
                gradient = _gradient_of(leaf, crossing, self.device)
                running.tensors.gradients[crossing.value, self.number] = gradient
            if crossing.detached and leaf is not None and leaf.grad is not None:
                raise TraceMismatchError(
                    "in the trace no unit of this stage gave a gradient to a tensor of another stage "
                    f"(shape {crossing.spec.shape}), and in microbatch {running.index} one does. Detach "
                    "it in all microbatches or in none."
                )
            if leaf is not None and leaf.requires_grad:
                leaf.grad = None
            if leaf is None or crossing.value in running.program.read_late:
                continue
            del running.tensors.leaves[crossing.value, self.number]
            if leaf.requires_grad:
                # The loss, which the step function holds on to, leads through the graph to this leaf.
                leaf.data = leaf.new_empty(0)
        running.tensors.free(self.number)
        if self.number in running.offloads:
            running.offloads[self.number].end()
        running.state.backward_ran()


def _gradient_of(leaf: Tensor | None, crossing: Crossing, device: torch.device) -> Tensor:
    if leaf is not None and leaf.grad is not None:
        return leaf.grad
    return torch.zeros(crossing.spec.shape, dtype=getattr(torch, crossing.spec.dtype), device=device)

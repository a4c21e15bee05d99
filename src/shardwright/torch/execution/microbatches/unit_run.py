"""Runs a unit as the plan says, and with the random numbers of its microbatch."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from shardwright.errors import TraceMismatchError
from shardwright.torch.backward.activation_checkpointing import call_recomputed
from shardwright.torch.execution.microbatches.microbatch_state import called_as_now
from shardwright.torch.interception.glue import call_without_hooks
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.program.program_checks import refusing_changes
from shardwright.torch.python_state.filled_containers import returning_contents
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.randomness import GeneratorState, Turn, get_state, same_state, set_state
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tracing.recorded_step import Step


def unit_run(instruction: Instruction, *, boundary: Boundary | None, microbatch: int) -> Callable[..., Any]:
    """Runs the unit of an instruction."""
    unit, allowed = instruction.step.func, instruction.flow.may_change
    call: Callable[..., Any] = partial(call_without_hooks, unit)
    if not instruction.step.flat:
        refuse = partial(refuse_other_contents, instruction.step, microbatch=microbatch)
        call = returning_contents(call, instruction.step.unit.fills, refuse)
    if instruction.divided and boundary is not None:
        left = [(module, key) for module, key, _ in instruction.step.unit.attributes]
        call = boundary.around(unit, call, attributes=left, stays=instruction.stays)
    if allowed is not None:
        call = refusing_changes(call, unit, allowed, line=instruction.step.line, microbatch=microbatch)
    if instruction.recompute:
        call = called_as_now(call, instruction.attributes.set_before)
        call = partial(_recomputed, unit, call)
    return call


def _recomputed(unit: nn.Module, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return call_recomputed(unit, call, args, kwargs)


def refuse_other_contents(step: Step, *, microbatch: int) -> NoReturn:
    """Refuses the call of a unit that leaves other entries in containers than other ranks find in theirs."""
    raise TraceMismatchError(
        f"{step.call} leaves other entries in a list or a dictionary among its arguments in microbatch "
        f"{microbatch} than in the trace, by which other ranks go. Give it a new container in every "
        "microbatch, or return what it has made."
    )


class MicrobatchGenerators:
    """Gives each step of a microbatch the generators as a plain loop would have them there."""

    def __init__(self, index: int, device: torch.device):
        self._index = index
        self._device = device
        self._turns: Mapping[int, Turn] = {}
        self._own: tuple[torch.Generator, ...] = ()
        # What the step that is running must leave; None where nobody has to know.
        self._must_leave: GeneratorState | None = None

    def run_ahead(self, turns: Mapping[int, Turn], own: tuple[torch.Generator, ...]) -> None:
        """Takes what was run ahead for this microbatch."""
        self._turns, self._own = turns, own

    def set_for_next(self, position: int) -> None:
        """Gives the generators the state from which the next step of this rank draws, if one does."""
        coming = [later for later in self._turns if later >= position]
        if coming:
            set_state(self._turns[min(coming)].before, self._device, self._own)

    def before_step(self, instruction: Instruction, position: int) -> None:
        """Makes random numbers those that a plain loop would draw in this step."""
        self._must_leave = None
        turn = self._turns.get(position) if instruction.step.draws else None
        if turn is not None:
            set_state(turn.before, self._device, self._own)
            self._must_leave = turn.after
        elif instruction.step.looks_at_values:
            self._must_leave = get_state(self._device, self._own)

    def after_step(self, instruction: Instruction) -> None:
        """Refuses a step that has drawn more or less than was run ahead for all other steps."""
        if self._must_leave is None:
            return
        if same_state(self._must_leave, get_state(self._device, self._own)):
            return
        step = instruction.step
        raise TraceMismatchError(
            f"{step.line or user_line()}: {name_of_call(step.func)} takes another amount of "
            f"random numbers in microbatch {self._index} than in the trace, so other stages would draw other "
            "numbers than in a single process. How many it takes must not follow from values or from other "
            "random numbers. Draw always, and choose with torch.where or a mask; numbers whose drawing looks "
            "at values (RReLU, Poisson, binomial, Gamma, Beta, Dirichlet) can be drawn before the step "
            "function and passed to it. What a layer filters by values (self-loops of a graph) can be "
            "filtered before it, too."
        )

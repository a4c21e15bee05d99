"""Sets each microbatch's random generators to the state that a plain loop would have."""

from collections.abc import Mapping

import torch

from shardwright.errors import TraceMismatchError
from shardwright.torch.program.instructions import Instruction
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.randomness import GeneratorState, Turn, get_state, same_state, set_state

__all__ = ["MicrobatchGenerators"]


class MicrobatchGenerators:
    """Gives each step of a microbatch the generators as a plain loop would have them there.

    Args:
        index: which microbatch.
        device: where this rank computes.
    """

    def __init__(self, index: int, device: torch.device):
        self._index = index
        self._device = device
        self._turns: Mapping[int, Turn] = {}
        self._own: tuple[torch.Generator, ...] = ()
        # What the step that is running must leave; None where nobody has to know.
        self._must_leave: GeneratorState | None = None

    def run_ahead(self, turns: Mapping[int, Turn], own: tuple[torch.Generator, ...]) -> None:
        """Takes what was run ahead for this microbatch.

        Args:
            turns: position of a step that draws random numbers -> what it must find, and leave.
            own: generators of the script's own, that are drawn from.
        """
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
        """Refuses a step that has drawn more or less than was run ahead for all other steps.

        Raises:
            TraceMismatchError: it has.
        """
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

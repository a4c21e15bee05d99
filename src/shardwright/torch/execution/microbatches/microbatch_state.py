"""The state of modules and of PyTorch that one microbatch finds, while others take turns with it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from shardwright.torch._private import put_parametrization_cache
from shardwright.torch.execution.microbatches.own_attributes import OwnAttributes, held_again
from shardwright.torch.program.program import Program
from shardwright.torch.python_state.snapshot import SlotContent
from shardwright.torch.pytorch.modules import OwnHooks
from shardwright.torch.pytorch.tree import Slot

__all__ = ["MicrobatchState"]


class MicrobatchState:
    """The hooks, cached weights and attributes of one microbatch.

    Args:
        index: which microbatch.
        program: what this rank does.
        model: the whole model.
        attributes: those that microbatches change; None where they change none.
    """

    def __init__(self, index: int, program: Program, model: nn.Module, attributes: OwnAttributes | None):
        self._index = index
        self._hooks = OwnHooks(model) if program.trace.effects.temporary_hooks else None
        self._attributes = attributes
        self._parametrizations: tuple[int, dict[Any, Any]] | None = None
        self._has_backward = program.trace.backward_at is not None
        self._backwards_left = len(program.stages)
        # Of each stage, what its units left in attributes of their own.
        self._left: dict[int, dict[Slot, SlotContent]] = {}

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        """Swaps in the hooks, cached weights and attributes of this microbatch."""
        own = nullcontext() if self._attributes is None else self._attributes.of(self._index)
        with own, self.swapped_in_to_leave():
            yield

    @contextmanager
    def swapped_in_to_leave(self) -> Iterator[None]:
        """Swaps in the hooks and cached weights alone: for a step function that is left before it returns."""
        outside = put_parametrization_cache(self._parametrizations)
        try:
            with nullcontext() if self._hooks is None else self._hooks.in_force():
                yield
        finally:
            self._parametrizations = put_parametrization_cache(outside)

    def note_left(self, stage: int, places: Sequence[Slot]) -> None:
        """Records what a unit has left in its attributes, for its backward.

        Args:
            stage: of the unit.
            places: the attributes.
        """
        if places and self._has_backward:
            self._left.setdefault(stage, {}).update((place, SlotContent.of(*place)) for place in places)

    @contextmanager
    def as_left(self, stage: int) -> Iterator[None]:
        """Puts back what the microbatch left in attributes, for a backward of this stage.

        A reversible layer, for example, keeps the state of the generator in its own.
        """
        left = self._left.pop(stage, {})
        own = nullcontext() if self._attributes is None else self._attributes.again_for(self._index)
        with own, held_again(list(left.values())):
            yield

    def backward_reached(self) -> None:
        """Releases what nobody reads behind ``backward``."""
        if self._attributes is not None:
            self._attributes.backward_reached(self._index)

    def backward_ran(self) -> None:
        """Counts the backwards that have ended, but for gradients of weights that are left for later."""
        self._backwards_left -= 1
        if self._backwards_left == 0 and self._attributes is not None:
            self._attributes.backward_done(self._index)

    def clear(self) -> None:
        """Releases what units have left."""
        self._left.clear()

"""What a microbatch finds in the model's attributes, and leaves there.

An attribute that it has not written yet holds what the previous microbatch left (see `attribute_use`). An
attribute that every microbatch restores holds what all of them leave.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch._private.modules import put_parametrization_cache
from shardwright.torch.program.program import Program
from shardwright.torch.python_state.attribute_use import AttributeUse
from shardwright.torch.python_state.snapshot import SlotContent
from shardwright.torch.pytorch.modules import OwnHooks
from shardwright.torch.pytorch.tree import Slot


class OwnAttributes:
    """The attributes that the microbatches of one batch change."""

    def __init__(self, programs: Sequence[Program]):
        places: dict[tuple[int, str], list[AttributeUse]] = {}
        for use in (use for program in programs for use in program.trace.effects.attributes):
            places.setdefault((id(use.module), use.key), []).append(use)
        self._uses = [uses[0] for uses in places.values()]
        self._places: list[Slot] = [(use.module, use.key) for use in self._uses]
        # Of the graph of one microbatch, and nobody looks for it behind `backward`: it need not live longer.
        self._passing = [
            all(use.first_read is None and use.carries_tensor and not use.read_late for use in uses)
            for uses in places.values()
        ]
        self._writes_first = [all(use.first_read is None for use in uses) for uses in places.values()]
        self._put_back = [all(use.put_back for use in uses) for uses in places.values()]
        self._runs_again = any(program.trace.recomputes for program in programs)
        self._read_in = [[program.read_in.get(place) for program in programs] for place in places]
        self._turns = [0] * len(programs)
        self._last = len(programs) - 1
        self._initial = [SlotContent.of(*place) for place in self._places]
        self._written: list[dict[int, SlotContent]] = [{} for _ in self._places]

    @contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Swaps in the attributes that this microbatch finds; records what it writes."""
        found = self._put_for(microbatch)
        changed = []
        try:
            yield
        finally:
            for number, (place, before) in enumerate(zip(self._places, found, strict=True)):
                now = SlotContent.of(*place)
                is_other = now.value is not before.value or not now.has_same(before)
                if is_other:
                    changed.append(number)
                # The same object or number may have been written again.
                if self._writes_first[number] or is_other:
                    self._written[number][microbatch] = now
        for number in changed:
            self._check_not_read_yet(number, microbatch)
        self._turns[microbatch] += 1

    @contextmanager
    def again_for(self, microbatch: int) -> Iterator[None]:
        """Swaps in the attributes that this microbatch wrote, for a backward."""
        self._put_for(microbatch)
        yield

    def _put_for(self, microbatch: int) -> list[SlotContent]:
        found = [self._found_by(number, microbatch) for number in range(len(self._places))]
        for content in found:
            content.put_with_inside()
        return found

    def _check_not_read_yet(self, number: int, microbatch: int) -> None:
        if self._put_back[number]:
            return
        read_in, turns = self._read_in[number], self._turns
        for later in range(microbatch + 1, len(turns)):
            turn = read_in[later]
            if turn is not None and turns[later] > turn:
                raise TraceMismatchError(
                    f"microbatch {microbatch} changes the attribute {self._uses[number].name} on a later "
                    f"stage than in the trace, and microbatch {later} has read it already. Read and change "
                    "it in one place, or have one stage on each rank (pipeline: 1f1b). A running number "
                    "of the loss (a normaliser) can be counted once for each batch, before the step "
                    "function, and passed to it."
                )

    def backward_reached(self, microbatch: int) -> None:
        """Releases what nobody will ask this microbatch for."""
        if not self._runs_again:
            self._let_go(microbatch)

    def backward_done(self, microbatch: int) -> None:
        """Releases what was kept for its backward, which has ended on this rank."""
        if self._runs_again:
            self._let_go(microbatch)

    def _let_go(self, microbatch: int) -> None:
        if microbatch != self._last:
            for written, passing in zip(self._written, self._passing, strict=True):
                if passing:
                    written.pop(microbatch, None)

    def finish(self) -> None:
        """Leaves the attributes as a plain loop would: as the last microbatch wrote them."""
        for number, read_in in enumerate(self._read_in):
            if self._put_back[number] and any(turn is not None for turn in read_in):
                self._check_put_back(number)
        for number in range(len(self._places)):
            self._found_by(number, self._last).put_with_inside()

    def _check_put_back(self, number: int) -> None:
        for microbatch, written in self._written[number].items():
            if not written.has_same(self._initial[number]):
                raise TraceMismatchError(
                    f"microbatch {microbatch} leaves another value in the attribute "
                    f"{self._uses[number].name} than it has found there, and when it was traced it put back "
                    "what it had found. Put it back in all microbatches, or write it before it is read."
                )

    def _found_by(self, number: int, microbatch: int) -> SlotContent:
        written = self._written[number]
        if self._put_back[number]:
            return written.get(microbatch, self._initial[number])
        last = max((index for index in written if index <= microbatch), default=None)
        return self._initial[number] if last is None else written[last]


@contextmanager
def held_again(contents: Sequence[SlotContent]) -> Iterator[None]:
    """Has the modules hold these; puts back what was there, where nothing else was written."""
    before = [SlotContent.of(content.holder, content.key) for content in contents]
    for content in contents:
        content.put()
    try:
        yield
    finally:
        for content, other in zip(contents, before, strict=True):
            if content.is_there:
                other.put()


def called_as_now(call: Callable[..., Any], places: Sequence[tuple[nn.Module, str]]) -> Callable[..., Any]:
    """A call that finds in these attributes what is there now, whenever it is made."""
    contents = [SlotContent.of(module, key) for module, key in places]
    contents = [c for c in contents if not (isinstance(c.value, Tensor) and c.value.requires_grad)]
    if not contents:
        return call

    def called(*args: Any, **kwargs: Any) -> Any:
        with held_again(contents):
            return call(*args, **kwargs)

    return called


class MicrobatchState:
    """The hooks, cached weights and attributes of one microbatch."""

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
        """Records what a unit has left in its attributes, for its backward."""
        if places and self._has_backward:
            self._left.setdefault(stage, {}).update((place, SlotContent.of(*place)) for place in places)

    @contextmanager
    def as_left(self, stage: int) -> Iterator[None]:
        """Puts back what the microbatch left in attributes, for a backward of this stage."""
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

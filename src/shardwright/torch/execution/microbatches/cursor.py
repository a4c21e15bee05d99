"""Tracks where a microbatch is, in its program and on its stages; looks up each call of the step function.

Unit calls, and operations on unit results or parameters, are placed on ranks: they must match the trace one
by one. A *free* operation depends on neither. Every rank runs it for itself, so it makes no difference
whether the trace contains it::

    trace                           microbatch 0                    microbatch 1
    arange     free                 arange     as in the trace
    mul        free                 mul        as in the trace
    add        on stage 0           add                             add      what is free is passed over

So a script may compute a table once and keep it: in an attribute, a buffer, a dictionary, behind
``lru_cache``.

The executor says whose turn it is, stage by stage; the step function is left where it comes to another one.
"""

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from shardwright.errors import TraceMismatchError
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.interception.coroutine import Coroutine
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.step_code import assumed_loss
from shardwright.torch.program.instructions import Instruction, Place
from shardwright.torch.program.program import FreeOperations, Program
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import flatten, leaves
from shardwright.torch.randomness import SKIPS_BY_PYTHON, get_state, same_state
from shardwright.torch.script_collectives import COLLECTIVES


class Cursor:
    """Where one microbatch is.

    Attributes:
        position: number of instructions that are done or passed over.
        stage: the stage being run; -1 before the start.
        behind_backward: the step function has called ``backward``.
        behind_end: it has left its program: every rank runs what follows.
    """

    def __init__(
        self,
        index: int,
        program: Program,
        parameters: Callable[[], Collection[int]],
        device: torch.device,
        run: Callable[[], Any],
        *,
        around: Callable[[], AbstractContextManager[None]],
        before_pause: Callable[[], None],
    ):
        self.position = 0
        self.stage = -1
        self.behind_backward = self.behind_end = False
        self._index = index
        self._program = program
        self._free = program.free_operations
        self._parameters = parameters
        self._device = device
        self._around = around
        self._before_pause = before_pause
        self._coroutine = Coroutine(run)
        # The next stage of this rank that has work; None before the start.
        self._next_stage: int | None = None
        # Whether the step function waits for other ranks now, and whether it may block this one.
        self._waits = self._may_block = False
        backward_at = program.trace.backward_at
        # The position at which instructions end for now.
        self._end = len(program.instructions) if backward_at is None else backward_at
        # Tensors that steps of this rank gave: id -> the tensor, as long as it lives, and its value.
        self._made: dict[int, tuple[weakref.ref[Tensor], int | None]] = {}
        self._spoilt: set[int] = set()  # memory that every rank has, and of which one has another content

    # ---- turns, as the executor has them ----

    def forward(self, stage: int) -> None:
        """Runs the step function up to work of another stage of this rank, or backward, or the end.

        One that waits for other ranks goes on if the stage has work in it.
        """
        self._may_block = False
        if self._coroutine.finished or self.behind_backward:
            return
        if self._waits:
            self.stage = stage
            if self.has_work(stage):
                self._resume()
        elif self._next_stage in (None, stage):  # else the stage has nothing to compute
            self.stage = stage
            self._resume()

    def come_to_backward(self) -> bool:
        """Whether the step function has called ``backward``, or may still do so; goes on if it waits."""
        self._may_block = True
        if self._waits:
            self._resume()
        return self.behind_backward or not self._coroutine.finished

    def finish(self) -> Any:
        """Runs the code after ``backward``; returns what the step function returned."""
        self._may_block = True
        if not self._coroutine.finished:
            self._resume()
        return self._coroutine.result

    def close(self) -> None:
        """Leaves a step function that has not returned; lets go of it."""
        try:
            self._coroutine.close()
        finally:
            self._coroutine = _ENDED
            self._made.clear()

    def _resume(self) -> None:
        with self._around():
            self._coroutine.resume()

    # ---- turns, inside the step function ----

    def enter(self, stage: int) -> None:
        """Pauses until the executor runs this stage."""
        if stage == self.stage:
            return
        self._next_stage = stage
        while self.stage != stage:
            self._pause()

    def wait_for_others(self, home: int | None = None) -> None:
        """Leaves the step function until this rank has nothing else to do.

        Not where its stage has work left, for which other ranks wait: a value of an earlier stage was made
        before that.
        """
        while not self._may_block:
            if self.has_work(self.stage):
                if home is not None and home > self.stage:
                    raise TraceMismatchError(
                        f"{user_line()}: the step function reads a value here that it did not read when it "
                        "was traced, of a later stage than the one that computes what follows. Compute all "
                        "that the loss is made of first, and read values then."
                    )
                break
            self._waits = True
            self._pause()
        self._waits = False

    def pause_for_backward(self) -> None:
        """Leaves the step function until this microbatch has no backward left on this rank."""
        self.behind_backward = True
        self._coroutine.pause()

    def _pause(self) -> None:
        self._before_pause()
        self._coroutine.pause()

    # ---- calls ----

    def operation(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Instruction | None:
        """The instruction of a torch function; None for a free one that the trace does not have."""
        placed = self._free is FreeOperations.AS_TRACED or func in COLLECTIVES
        if placed or not self.rests_on_nothing(args, kwargs):
            return self._placed(func)
        found = self._find_free(func)
        if found is None and self._free is not FreeOperations.ANY:
            self.mismatch(name_of_call(func))
        if found is not None:
            self.position = found + 1
        return None if found is None else self._program.instructions[found]

    def unit_call(self, module: nn.Module) -> Instruction:
        return self._placed(module)

    def backward(self, loss: Any) -> None:
        """The step function calls ``backward``; refuses another loss than in the trace."""
        self._pass_over_free()
        if self.behind_backward or self.position != self._program.trace.backward_at:
            self.mismatch("backward()")
        self.behind_backward = True
        self._end = len(self._program.instructions)
        self._compare(loss, self._program.trace.graph.loss, "the loss is")

    def end(self, result: Any) -> None:
        """The step function returns; refuses other tensors in its result than in the trace."""
        self._pass_over_free()
        if self.position < len(self._program.instructions):
            line = self._program.instructions[self.position].step.line
            self.mismatch("nothing more", line or "the end of the step function")
        items = flatten(result)[0] if self._program.trace.result_values else []
        for position, value in self._program.trace.result_values:
            self._compare(items[position] if position < len(items) else None, value, "the result is")

    def compare_arguments(
        self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Refuses another stand-in among the arguments of a step than in the trace."""
        step = instruction.step
        items: Sequence[Any] = args if step.flat else flatten((args, kwargs))[0]
        for position, expected, elsewhere in instruction.expects:
            item = items[position] if position < len(items) else None
            if item.value != expected if type(item) is DeferredTensor else elsewhere:
                self._refuse_other(f"{name_of_call(step.func)} gets", step.line)

    def _compare(self, item: Any, value: int | None, what: str) -> None:
        expected = None if value is None else self._program.trace.tensors.stand_ins[value]
        if expected is not None and type(item) is DeferredTensor and item.value != expected:
            self._refuse_other(what)

    def _refuse_other(self, what: str, line: str = "") -> NoReturn:
        raise TraceMismatchError(
            f"{line or user_line()}: {what} another tensor in microbatch {self._index} than in the trace, by "
            "which ranks send each other what they need. What is chosen among tensors must be the same for "
            "every batch, or follow from the arguments of the step function: pass what decides it to the "
            "step function as an argument, or put the choice inside one module."
        )

    @property
    def rest(self) -> Sequence[Instruction]:
        """The steps not called yet."""
        return self._program.instructions[self.position :]

    def has_work(self, stage: int | None = None) -> bool:
        """Whether anything is left that this rank computes, but for what stands for code behind the end."""
        rest = islice(self._program.instructions, self.position, None)
        mine = (each for each in rest if each.place is Place.HERE and each.step.func is not assumed_loss)
        return any(stage is None or each.stage == stage for each in mine)

    @property
    def is_at_end(self) -> bool:
        """Whether the step function has come to where its program ends: nothing more is called by it."""
        if not self._program.trace.ends:
            return False
        position = self._behind_free()
        if position == self._end:
            return True
        return self._program.instructions[position].step.func is assumed_loss

    @property
    def is_through(self) -> bool:
        """Whether the program has nothing left that must be called."""
        backward_left = self._program.trace.backward_at is not None and not self.behind_backward
        return not backward_left and self._behind_free() == len(self._program.instructions)

    @property
    def is_at_backward(self) -> bool:
        return not self.behind_backward and self._behind_free() == self._program.trace.backward_at

    @property
    def has_units_left(self) -> bool:
        return any(isinstance(each.step.func, nn.Module) for each in self.rest)

    def run_unknown(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a free operation that the trace does not have: it may not take random numbers."""
        before = get_state(self._device)
        result = func(*args, **kwargs)
        if not same_state(get_state(self._device), before):
            self.mismatch(name_of_call(func))
        return result

    # ---- what came of them ----

    def note_made(self, result: Any, given: Iterable[Any], values: Mapping[int, int]) -> None:
        """Records the results of this rank's step."""
        free = {id(item) for item in given}
        for position, item in enumerate([result] if isinstance(result, Tensor) else leaves(result)):
            if isinstance(item, Tensor) and id(item) not in free:
                value = values.get(position, self.value_of(item))  # a step may give back what it was given
                self._made[id(item)] = weakref.ref(item), value

    def note_spoilt(self, instruction: Instruction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Records tensors that every rank has, and of which only one will have the content."""
        items = leaves((args, kwargs))
        self._spoilt.update(storage_key(items[position]) for position in instruction.spoils)

    def is_spoilt(self, item: Any) -> bool:
        """Whether every rank has a tensor, and only one what is in it now."""
        return bool(self._spoilt) and isinstance(item, Tensor) and storage_key(item) in self._spoilt

    def is_free(self, item: Any) -> bool:
        """Whether every rank has it: it does not come from a unit, and it is no parameter."""
        if not isinstance(item, Tensor):
            return True
        if isinstance(item, DeferredTensor):
            return False
        made = self._made.get(id(item))
        if made is not None and made[0]() is item:
            return False
        return not isinstance(item, nn.Parameter) or id(item) not in self._parameters()

    def value_of(self, item: Any) -> int | None:
        """The value of a tensor that a step of this rank gave; None for anything else."""
        made = self._made.get(id(item))
        return made[1] if made is not None and made[0]() is item else None

    def mismatch(self, found: str, line: str = "") -> NoReturn:
        """Refuses a step function that goes another way than the trace."""
        position, program = self.position, self._program
        expected = "the end of the step function"
        if position == program.trace.backward_at and not self.behind_backward:
            expected = "backward()"
        elif position < len(program.instructions):
            expected = name_of_call(program.instructions[position].step.func)
        raise TraceMismatchError(
            f"{line or user_line()}: microbatch {self._index} calls {found} where the trace has {expected}. "
            "The model takes another path than when it was traced, for a reason that the batch does not "
            f"show: a random choice, a counter, a global. {self._remedy}"
        )

    # ---- inside ----

    @property
    def _remedy(self) -> str:
        program = self._program
        if program.trace.random.python_at:
            return SKIPS_BY_PYTHON
        remedy = "Make the path the same in every microbatch, or put the choice inside one module."
        if self._free is FreeOperations.FEWER:
            remedy += (
                " What rests on neither modules nor parameters (a table that is kept) may be more than in "
                "the trace where each rank has one stage (pipeline: 1f1b) and code between modules is not "
                "recomputed."
            )
        return remedy

    def rests_on_nothing(self, args: tuple[Any, ...] | list[Any], kwargs: dict[str, Any]) -> bool:
        """Whether every rank has all tensors among the arguments of an operation."""
        return all(map(self._is_all_free, args)) and (
            not kwargs or all(map(self._is_all_free, kwargs.values()))
        )

    def _is_all_free(self, item: Any) -> bool:
        if isinstance(item, Tensor):
            return self.is_free(item)
        kind = type(item)
        if kind is tuple or kind is list:
            return all(map(self._is_all_free, item))
        return kind in _NO_TENSORS or all(map(self.is_free, leaves(item)))

    def _placed(self, func: Any) -> Instruction:
        self._pass_over_free()
        if self.position == self._end:
            self.mismatch(name_of_call(func))
        instruction = self._program.instructions[self.position]
        if instruction.step.func is not func and instruction.step.func != func:
            self.mismatch(name_of_call(func))
        self.position += 1
        return instruction

    def _find_free(self, func: Any) -> int | None:
        """Finds a free operation in the trace, before anything that has a place or draws."""
        instructions = self._program.instructions
        for position in range(self.position, self._end):
            instruction = instructions[position]
            if instruction.place is not Place.FREE:
                return None
            if instruction.step.func is func or instruction.step.func == func:
                return position
            if instruction.step.draws:
                return None
        return None

    def _pass_over_free(self) -> None:
        self.position = self._behind_free()

    def _behind_free(self) -> int:
        """The position of the next instruction that cannot be left out."""
        position, end = self.position, self._end
        if self._free is FreeOperations.AS_TRACED:
            return position
        while position < end:
            instruction = self._program.instructions[position]
            if instruction.place is not Place.FREE or instruction.step.draws:
                break
            position += 1
        return position


_ENDED = Coroutine(lambda: None)
_NO_TENSORS = frozenset({type(None), bool, int, float, str, slice, torch.dtype, torch.device, type(Ellipsis)})

"""What is to be traced, its steps, and the trace of a microbatch."""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model_graph import ModelGraph
from shardwright.runtime.traced import Change, TensorFacts
from shardwright.torch.backward.loss_reduction import LossForm
from shardwright.torch.batch.batch import Batch
from shardwright.torch.counting.compiled_modules import HookEffects
from shardwright.torch.interception.step_code import ReadingStep
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.python_state.attribute_use import AttributeUse
from shardwright.torch.python_state.watched_numbers import NumberReads
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.tensors import AutocastState
from shardwright.torch.pytorch.tree import Slot, Structure
from shardwright.torch.randomness import Draw
from shardwright.torch.tracing.path import Path
from shardwright.torch.tracing.working_memory import WorkingMemory

_NUMBERS = frozenset({bool, int, float, str})


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step, for ranks that do not execute it.

    Attributes:
        structure: of the result; None for a step that every rank executes.
        leaves: its leaves as such a rank returns them.
        passed: (position in the result, position in the arguments) of arguments that are returned as they
            are.
    """

    structure: Structure | None = None
    leaves: tuple[Any, ...] = ()
    passed: tuple[tuple[int, int], ...] = ()

    @property
    def numbers(self) -> tuple[tuple[int, Any], ...]:
        """(position among the leaves, value) of what is neither a tensor nor an object."""
        return tuple((p, item) for p, item in enumerate(self.leaves) if type(item) in _NUMBERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitCall:
    """The part of a step that only calls of units have.

    Attributes:
        attributes: where the unit leaves tensors: (module, name, what another rank finds there). Among the
            writes of the step they follow the leaves of the result.
        passed_attributes: where it leaves free arguments: (module, name, position in the arguments).
        recomputed: the step function itself computes it again in the backward (``torch.utils.checkpoint``).
        fills: numbers of the containers among its arguments that it changes (see `Containers`).
        found: attributes inside the unit that it reads (see `unit_attributes`): its last arguments.
        own_results: positions of results in memory of the unit's own, which its next call overwrites.
        shared_results: the same of a unit whose results are changed afterwards, under both names.
    """

    attributes: tuple[tuple[nn.Module, str, Tensor], ...] = ()
    passed_attributes: tuple[tuple[nn.Module, str, int], ...] = ()
    recomputed: bool = False
    fills: tuple[int, ...] = ()
    found: tuple[str, ...] = ()
    own_results: tuple[int, ...] = ()
    shared_results: tuple[int, ...] = ()


_NO_RESULT, _NO_UNIT = StepResult(), UnitCall()


@dataclass(slots=True, kw_only=True)
class Step:
    """One intercepted operation or unit call, in the order of execution.

    Attributes:
        node: index of its node in the graph; None for free operations.
        looks_at_values: values decide what it does.
        reads: (position among the leaves of the arguments, value) of each value that it reads.
        writes: (position among the leaves of the result, value).
        changes: what it changes in place, and what shares memory with that and is read later.
        bases: for each memory of which several tensors change, the one that the others are views of.
        result: for ranks that do not execute it.
        unit: further facts about the call of a unit.
        changed_parameters: names of parameters that it changes in place.
        counters: names of buffers that it reads or changes on every rank.
        given_counters: its arguments have such buffers, although it has a place.
        flat: its arguments are the leaves themselves, all by position.
    """

    func: Any
    node: int | None
    line: str = ""
    draws: tuple[Draw, ...] = ()
    looks_at_values: bool = False
    reads: tuple[tuple[int, int], ...] = ()
    writes: tuple[tuple[int, int], ...] = ()
    changes: tuple[Change, ...] = ()
    bases: tuple[Change, ...] = ()
    result: StepResult = _NO_RESULT
    unit: UnitCall = _NO_UNIT
    changed_parameters: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    given_counters: bool = False
    flat: bool = False

    @property
    def call(self) -> str:
        """The call and its line, as messages name them: ``train.py:7: add()``."""
        return f"{self.line}: {name_of_call(self.func)}"

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values that it depends on, each once."""
        changed = [c.before for c in (*self.changes, *self.bases) if c.before is not None]
        return tuple(dict.fromkeys([*(value for _, value in self.reads), *changed]))

    @property
    def shared_results(self) -> tuple[int, ...]:
        """Positions of results in memory of its unit's own that are changed afterwards."""
        return self.unit.shared_results


@dataclass(slots=True)
class Sample:
    """Arguments of one call of a cost class, from which it can be run again to be timed.

    Attributes:
        leaves: leaves of the arguments; fake tensors in place of real ones.
        hooks: knows which hooks of the unit change something.
    """

    func: Any
    leaves: list[Any]
    structure: Structure
    autocast: AutocastState = ()
    hooks: HookEffects = field(default_factory=HookEffects)


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceEnd:
    """The end of a trace.

    Attributes:
        at: the place (see `EndFinder`) behind which the step function goes on as every rank runs it (see
            `step_code`); infinite where all that it does is traced.
        line: the line that reads a value there, or soon behind that; empty where the step function has come
            to its own end.
        read_at: the line that reads a value there, on this rank; empty where none does.
        wanted: the place where it would have to end, for what this rank reads, changes and leaves in
            variables.
    """

    at: float = math.inf
    line: str = ""
    read_at: str = ""
    wanted: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomUse:
    """The random numbers of a step function that its steps do not tell of.

    Attributes:
        python_at: how many steps have run where random numbers of Python or NumPy are drawn between units.
        set_at: the line that has set PyTorch's generators so that ranks would not draw what a plain loop
            draws; empty if none has.
    """

    python_at: tuple[float, ...] = ()
    python_in_units: bool = False
    set_at: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEffects:
    """Changes that a step function makes to other things than values of the graph.

    Attributes:
        changes_batch: it changes tensors of its batch in place.
        temporary_hooks: it registers hooks, and has removed them all at its end.
        attributes: changed attributes of modules that are used between units.
        left_in_units: attributes of modules inside units that these change.
        replaced_buffers: name of a buffer outside of units in whose place it puts another tensor that comes
            from units -> the buffer's shapes before and after, or empty where nothing reads it before.
    """

    changes_batch: bool = False
    temporary_hooks: bool = False
    attributes: tuple[AttributeUse, ...] = ()
    left_in_units: tuple[Slot, ...] = ()
    replaced_buffers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True)
class Trace:
    """One microbatch of a step function, traced.

    Attributes:
        graph: the nodes that are placed on stages.
        unit_names: names of all units, also of those that are not called.
        steps: everything that is intercepted, free operations included.
        backward_at: number of steps before ``backward``; None without one.
        result_values: (position among the leaves of what the step function returned, value).
        path: finds out whether another microbatch goes the same way; None where only another trace tells.
        recomputes: the step function itself recomputes activations (``torch.utils.checkpoint``) around units.
        repeated_buffers: names of those that ``torch.utils.checkpoint`` changes a second time.
        random: random numbers that the steps do not tell of.
        loss: how the loss is reduced over samples; None where the trace ends before.
        evaluated: without ``backward``: place in the result -> how that number is reduced over samples.
        samples: cost class -> arguments of its first call, to be timed.
        batch_shapes: of the tensors of the microbatch.
    """

    graph: ModelGraph
    tensors: TensorFacts
    unit_names: tuple[str, ...]
    steps: list[Step]
    backward_at: int | None
    result_values: tuple[tuple[int, int], ...]
    path: Path | None
    recomputes: bool
    repeated_buffers: frozenset[str]
    random: RandomUse
    effects: SideEffects
    end: TraceEnd
    loss: LossForm | None
    evaluated: Mapping[int, LossForm]
    samples: Mapping[str, Sample]
    batch_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def ends(self) -> bool:
        """Whether the step function goes on behind the last step."""
        return math.isfinite(self.end.at)

    @property
    def in_shared_memory(self) -> frozenset[int | None]:
        """Values that share memory and that code behind the end may use, as their stand-ins name them."""
        seen = self.graph.outputs if self.ends else range(len(self.graph.values))
        names: dict[int, set[int | None]] = {}
        for value in seen:
            names.setdefault(self.tensors.memory[value], set()).add(self.tensors.stand_ins[value])
        return frozenset(name for group in names.values() if len(group) > 1 for name in group)

    def holds_for(self, part: Batch) -> bool:
        """Whether another microbatch of the same signature is known to take the same path."""
        return self.path is not None and self.path.taken_by(part.leaves)

    @property
    def counters_in_one_place(self) -> bool:
        """Whether nothing that has a place uses a counter, or comes between its uses."""
        if any(step.given_counters for step in self.steps):
            return False
        for name in {name for step in self.steps for name in step.counters}:
            used = [index for index, step in enumerate(self.steps) if name in step.counters]
            if any(step.node is not None for step in self.steps[used[0] : used[-1]]):
                return False
        return True

    @property
    def digest(self) -> str:
        """A hash of all that makes a difference to a program: equal where the same one serves."""
        memories: dict[int, int] = {}  # as they come up: others in every trace
        rows: list[Any] = [
            self.graph.fingerprint,
            self.backward_at,
            self.result_values,
            self.tensors.orders,
            self.ends,
        ]
        rows.append(sorted(self.repeated_buffers))
        for step in self.steps:
            changes = [
                (
                    c.position,
                    c.before,
                    c.after,
                    replace(c.view, memory=memories.setdefault(c.view.memory, len(memories))),
                )
                for c in (*step.changes, *step.bases)
            ]
            draws = [(str(draw.func), draw.items) for draw in step.draws]
            call = name_of_call(step.func), step.reads, step.writes, changes
            result = step.result.numbers, step.result.passed, step.unit.own_results, step.unit.shared_results
            rows.append((*call, *result, step.unit.fills, draws))
        for use in self.effects.attributes:
            rows.append((use.name, use.put_back, [(access.before, access.writes) for access in use.accesses]))
        return hashlib.sha256(repr(rows).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRequest:
    """A step function that is to be traced, and how: see `trace_step`.

    Attributes:
        ends_at: see `EndFinder`.
        units_may_change: modules that raise `DeferredReadError` are kept whole, and another trace is tried.
        memory: cost class -> temporary memory; what is not there is counted and added. None: it is not
            counted.
    """

    unit_map: UnitMap
    function: Callable[..., Any]
    arguments: Any
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    batch_size: int = 1
    hooks: HookEffects = field(default_factory=HookEffects)
    numbers: NumberReads | None = None
    ends_at: float = math.inf
    units_may_change: bool = False
    memory: dict[str, WorkingMemory] | None = None
    on_unit: Callable[[], None] | None = None

    @property
    def may_read(self) -> bool:
        """Whether the step function's own code has a call that reads values."""
        return isinstance(self.function, ReadingStep) and self.function.may_read

"""What a trace writes down: every intercepted step, the graph they form, samples of what to time."""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from shardwright.model_graph import ModelGraph
from shardwright.runtime.traced import Change
from shardwright.torch.batch.batch import Batch
from shardwright.torch.counting.hook_effects import HookEffects
from shardwright.torch.python_state.attribute_use import AttributeUse
from shardwright.torch.python_state.snapshot import Slot
from shardwright.torch.pytorch.autocast import AutocastState
from shardwright.torch.pytorch.functions import name_of_call
from shardwright.torch.pytorch.layout import Order
from shardwright.torch.pytorch.tree import Structure
from shardwright.torch.randomness.rng import Draw
from shardwright.torch.tracing.path import Path

_NUMBERS = frozenset({bool, int, float, str})

__all__ = ["Sample", "Step", "Trace"]


@dataclass(slots=True)
class Step:
    """One intercepted operation or unit call, in the order of execution.

    Attributes:
        func: the torch function, or the unit's module.
        node: index of its node in the graph; None for free operations.
        reads: (position among the leaves of the arguments, value) of each value that it reads.
        writes: (position among the leaves of the result, value).
        changes: what it changes in place, and what shares memory with that and is read later.
        bases: for each memory of which several tensors change, the one that the others are views of.
        structure: structure of the result.
        result: leaves of the result as a rank that does not execute it returns them.
        passed: (position in the result, position in the arguments) of arguments that are returned as they
            are.
        line: where in the user's code.
        draws: random numbers that it takes.
        looks_at_values: values decide what it does.
        changed_parameters: names of parameters that it changes in place.
        counters: names of buffers that it reads or changes on every rank.
        given_counters: its arguments have such buffers, although it has a place.
        attributes: where a unit leaves tensors: (module, name, what another rank finds there). Among
            `writes` they follow the leaves of the result.
        passed_attributes: where a unit leaves free arguments: (module, name, position in the arguments).
        flat: its arguments are the leaves themselves, all by position.
        recomputed: the step function itself computes it again in the backward (``torch.utils.checkpoint``).
        fills: a unit is given containers that units change.
        found: attributes inside the unit that it reads (see `attribute_inputs`): its last arguments.
        own_results: positions of results in memory of the unit's own, which its next call overwrites.
        shared_results: the same of a unit whose results are changed afterwards, under both names.
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
    structure: Structure | None = None
    result: tuple[Any, ...] = ()
    passed: tuple[tuple[int, int], ...] = ()
    changed_parameters: tuple[str, ...] = ()
    counters: tuple[str, ...] = ()
    given_counters: bool = False
    attributes: tuple[tuple[nn.Module, str, Tensor], ...] = ()
    passed_attributes: tuple[tuple[nn.Module, str, int], ...] = ()
    recomputed: bool = False
    flat: bool = False
    fills: bool = False
    found: tuple[str, ...] = ()
    own_results: tuple[int, ...] = ()
    shared_results: tuple[int, ...] = ()

    @property
    def numbers(self) -> tuple[tuple[int, Any], ...]:
        """(position among the leaves of the result, value) of what is neither a tensor nor an object."""
        return tuple((p, item) for p, item in enumerate(self.result) if type(item) in _NUMBERS)

    @property
    def inputs(self) -> tuple[int, ...]:
        """The values that it depends on, each once."""
        changed = [c.before for c in (*self.changes, *self.bases) if c.before is not None]
        return tuple(dict.fromkeys([*(value for _, value in self.reads), *changed]))


@dataclass(slots=True)
class Sample:
    """Arguments of one call of a cost class, from which it can be run again to be timed.

    Attributes:
        func: the unit's module, or the torch function.
        leaves: leaves of the arguments; fake tensors in place of real ones.
        structure: their structure.
        autocast: in force when it was called.
        hooks: knows which hooks of the unit change something.
    """

    func: Any
    leaves: list[Any]
    structure: Structure
    autocast: AutocastState = ()
    hooks: HookEffects = field(default_factory=HookEffects)


@dataclass(slots=True)
class Trace:
    """What one microbatch does.

    Attributes:
        graph: the nodes that are placed on stages.
        unit_names: names of all units, also of those that are not called.
        steps: everything that is intercepted, free operations included.
        backward_at: number of steps before ``backward``; None without one.
        result_values: (position among the leaves of what the step function returned, value).
        reads_data: Python looked at values of free tensors, so that another batch may take another path.
        path: how to find out whether it does; None where nothing is read, or where only another trace tells.
        recomputes: the step function itself recomputes activations (``torch.utils.checkpoint``) around units.
        changes_batch: the step function changes tensors of its batch in place.
        samples: cost class -> arguments of its first call.
        temporary_hooks: it registers hooks, and has removed them all at its end.
        state: buffers outside of units that the step function changes.
        initial: value -> name of the buffer of which it is the content at the start.
        memory: of each value: equal for those that share memory.
        attributes: changed attributes of modules that are used between units.
        shapes_asked: values whose shape Python asks for between units.
        orders: value -> the order of its dims in memory, where that is not their own.
        left_in_units: attributes of modules inside units that these change.
        python_draws: how many steps have run where random numbers of Python or NumPy are drawn between units.
        draws_in_units: units draw such numbers, too.
        stand_ins: of each value, the one that its stand-in names on other ranks: after a change in place,
            that of before. None where every rank has a tensor of its own.
        repeated_buffers: name of a buffer that ``torch.utils.checkpoint`` changes a second time -> whether
            it is changed just so, once in the forward.
        generators_set_at: where the step function has set PyTorch's generators so that ranks would not draw
            what a plain loop draws; empty if it has not.
        replaced_buffers: name of a buffer outside of units in whose place the step function puts another
            tensor that comes from units -> its shapes before and after, or empty where nothing reads the
            buffer before.
        end: the place (see `TraceEnd`) behind which the step function goes on as every rank runs it
            (see `step_code`); infinite where all that it does is traced.
        end_line: the line that reads a value there, or soon behind that; empty where the step function has
            come to its own end.
        read_at: the line that reads a value there, on this rank; empty where none does.
        wanted_end: the place where it would have to end, for what this rank reads, changes and leaves in
            variables.
    """

    graph: ModelGraph
    unit_names: tuple[str, ...]
    steps: list[Step]
    backward_at: int | None
    result_values: tuple[tuple[int, int], ...]
    reads_data: bool
    path: Path | None
    recomputes: bool
    changes_batch: bool
    samples: dict[str, Sample]
    temporary_hooks: bool = False
    state: tuple[str, ...] = ()
    initial: Mapping[int, str] = field(default_factory=dict)
    memory: tuple[int, ...] = ()
    attributes: tuple[AttributeUse, ...] = ()
    shapes_asked: frozenset[int] = frozenset()
    orders: Mapping[int, Order] = field(default_factory=dict)
    left_in_units: tuple[Slot, ...] = ()
    python_draws: tuple[float, ...] = ()
    draws_in_units: bool = False
    stand_ins: tuple[int | None, ...] = ()
    generators_set_at: str = ""
    repeated_buffers: Mapping[str, bool] = field(default_factory=dict)
    replaced_buffers: Mapping[str, str] = field(default_factory=dict)
    end: float = math.inf
    end_line: str = ""
    read_at: str = ""
    wanted_end: float = math.inf

    @property
    def ends(self) -> bool:
        """Whether the step function goes on behind the last step."""
        return math.isfinite(self.end)

    def holds_for(self, part: Batch) -> bool:
        """Whether another microbatch of the same signature is known to take the same path."""
        if self.path is None:
            return not self.reads_data
        return self.path.taken_by(part.leaves)

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
            self.orders,
            self.ends,
        ]
        rows.append(sorted(self.repeated_buffers.items()))
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
            rows.append((*call, step.numbers, step.passed, draws, step.own_results, step.shared_results))
        for use in self.attributes:
            rows.append((use.name, use.put_back, [(access.before, access.writes) for access in use.accesses]))
        return hashlib.sha256(repr(rows).encode()).hexdigest()

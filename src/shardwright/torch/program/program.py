"""What a rank runs of a microbatch, and what each step gives.

Every node of the graph has a home (see `homes`). A value is sent once to each other stage that reads it::

      stage 0              stage 1                     instruction on the rank of stage 1
    ┌───────────┐        ┌───────────┐
    │ v0 = wte  │        │           │                  wte, add, h.0:   ELSEWHERE (give deferred tensors)
    │ v1 = add  │        │           │
    │ v2 = h.0  │──v2───▶│ v3 = h.1  │                  h.1:  HERE, with input v2 received: a leaf of autograd
    └───────────┘        └───────────┘
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any

import torch

from shardwright.runtime.dataflow import Dataflow
from shardwright.runtime.homes import Assignment, Crossing, Crossings, crossings_of, gradients_of
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.program.instructions import Instruction, KeptOtherwise, instructions_of
from shardwright.torch.program.program_checks import check_trace, pauses_of
from shardwright.torch.pytorch.tree import flatten
from shardwright.torch.randomness import own_generators
from shardwright.torch.tensor_parallel.boundary import Boundary
from shardwright.torch.tracing.divided_tail import divided_tails
from shardwright.torch.tracing.trace_data import StepResult, Trace, UnitCall


def stand_in(result: StepResult, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of a step that another rank executes."""
    assert result.structure is not None
    if not result.passed:
        return result.structure.rebuild(result.leaves)
    items, filled = flatten((args, kwargs))[0], list(result.leaves)
    for position, source in result.passed:
        filled[position] = items[source]
    return result.structure.rebuild(filled)


def leave_stand_ins(unit: UnitCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Puts into attributes what a unit leaves there that another rank executes."""
    for owner, key, deferred in unit.attributes:
        vars(owner)[key] = deferred
    if unit.passed_attributes:
        items = flatten((args, kwargs))[0]
        for owner, key, place in unit.passed_attributes:
            vars(owner)[key] = items[place]


def given_back(
    result: StepResult, args: tuple[Any, ...], kwargs: dict[str, Any], *, is_free: Callable[[Any], bool]
) -> dict[int, Any]:
    """The arguments that a step gives back as they are, but for tensors of this rank."""
    if not result.passed:
        return {}
    items = flatten((args, kwargs))[0]
    passed = ((position, items[source]) for position, source in result.passed)
    return {position: item for position, item in passed if isinstance(item, DeferredTensor) or is_free(item)}


def with_stand_ins(result: Any, given: Mapping[int, Any]) -> Any:
    """Gives back the stand-ins that a step was given for tensors of other stages, and has given back.

    What came in for them is a leaf of this stage: a later stage of the rank has one of its own, and a step of
    another rank must find what the trace has::

        rank 0   x, bias = block0(x)             x, bias = block2(x, bias)     expects what block0 made
        rank 1              x, bias = block1(x, bias)
                                       └── as its caller gave it: the stand-in

    (`test_plans_at_random`.)
    """
    stand_ins = [(place, item) for place, item in given.items() if isinstance(item, DeferredTensor)]
    if not stand_ins:
        return result
    items, structure = flatten(result)
    for place, item in stand_ins:
        items[place] = item
    return structure.rebuild(items)


def copied_out(result: Any, positions: Iterable[int]) -> Any:
    """Copies a unit's results out of its own memory, where other microbatches would overwrite them."""
    items, structure = flatten(result)
    for position in positions:
        items[position] = items[position].clone()
    return structure.rebuild(items)


class FreeOperations(Enum):
    """The freedom of a microbatch to run other free operations than the trace.

    Attributes:
        AS_TRACED: all of them, in its order: an operation cannot be told to be free by its arguments alone,
            because operations that have a place change tensors that every rank has, or read the content of
            buffers.
        FEWER: some may be missing, as they were computed before and kept.
        ANY: there may also be others. What they keep for later is found in the order of a plain loop, unless
            microbatches take turns, or the backward runs code of the step function again.
    """

    AS_TRACED = auto()
    FEWER = auto()
    ANY = auto()


@dataclass(slots=True, kw_only=True)
class Program:
    """Everything that one pipeline rank needs to run microbatches of one signature.

    Attributes:
        trace: of one of them; without its samples.
        crossings: (source, target) -> values, for all ranks.
        gradients: (target, source) -> values whose gradients go back.
        read_late: values that steps behind ``backward`` read.
        displaced: values whose tensor is not in the user's variables, as their stand-ins name them.
        state: buffers that the step function changes -> pipeline rank of their home.
        read_in: attribute (id of the module, name) that is read before it is written -> how often a
            microbatch has paused on this rank by then.
        free_operations: how far these may differ from the trace.
        reads_nothing: no rank reads values in such a microbatch, as far as traces tell.
        as_planned: each parameter that the plan has a stage for is used by these stages alone.
        boundary: places what ranks share; None where they share nothing.
        staying: values of this rank that stay as ranks have them, between a unit and its tail.
        replay: runs its microbatches from a list of calls, where that is possible; set by the first batch.
    """

    trace: Trace
    instructions: Sequence[Instruction]
    rank: int
    stages: tuple[int, ...]
    stage_ranks: tuple[int, ...]
    home_of: tuple[int, ...]
    crossings: Crossings
    gradients: Crossings
    flops: int
    read_late: frozenset[int]
    displaced: frozenset[int | None]
    state: Mapping[str, int]
    read_in: Mapping[tuple[int, str], int]
    free_operations: FreeOperations
    draws: bool = False
    reads_nothing: bool = False
    as_planned: bool = True
    boundary: Boundary | None = None
    staying: frozenset[int] = frozenset()
    replay: Any = None

    @property
    def offloads(self) -> frozenset[int]:
        """Stages of which units are offloaded, on all ranks."""
        return frozenset(each.stage for each in self.instructions if each.offload)

    @property
    def loss_stage(self) -> int | None:
        """Home of the value given to ``backward``; None without one."""
        loss = self.trace.graph.loss
        return None if loss is None else self.home_of[loss]

    def sent_from(self, stage: int) -> list[Crossing]:
        """The values that leave a stage, by target."""
        return [each for (source, _), group in self.crossings.items() if source == stage for each in group]

    def received_by(self, stage: int) -> list[Crossing]:
        """The values that enter a stage, by source."""
        return [each for (_, target), group in self.crossings.items() if target == stage for each in group]


def generators_of(programs: Iterable[Program]) -> tuple[torch.Generator, ...]:
    """Generators of the script's own that microbatches draw from, in the same order on all ranks."""
    return own_generators(draw for program in programs for step in program.trace.steps for draw in step.draws)


_KEPT_AS_THEY_ARE = KeptOtherwise()


def build_program(
    trace: Trace,
    assignment: Assignment,
    *,
    rank: int,
    kept: KeptOtherwise = _KEPT_AS_THEY_ARE,
    divided: frozenset[str] = frozenset(),
    boundary: Boundary | None = None,
) -> Program:
    """Makes the program: what a rank computes, sends and receives."""
    graph = trace.graph
    homes, stage_ranks = assignment.homes, assignment.stage_ranks
    home_of = tuple(homes[value.producer] for value in graph.values)
    dataflow = Dataflow(trace, homes, home_of)
    crossings = crossings_of(dataflow, part_of=None if boundary is None else boundary.part_shape)
    check_trace(trace, homes, home_of, stage_ranks)
    local = tuple(stage for stage, owner in enumerate(stage_ranks) if owner == rank)
    stand_ins = trace.tensors.stand_ins
    cuts_between = boundary is not None and boundary.cuts
    tails = {} if boundary is None or cuts_between else divided_tails(trace)
    instructions = instructions_of(
        trace,
        dataflow,
        assignment,
        rank=rank,
        kept=kept,
        divided=divided,
        cuts_between=cuts_between,
        tails=tails,
    )
    staying = (value for each in instructions for value in each.staying)
    return Program(
        trace=replace(trace, samples={}),  # of use for measuring alone, and with objects of the batch
        instructions=instructions,
        rank=rank,
        stages=local,
        stage_ranks=stage_ranks,
        home_of=home_of,
        crossings=crossings,
        gradients=gradients_of(crossings),
        flops=sum(node.flops for node in graph.nodes),
        read_late=_read_after_backward(trace),
        displaced=frozenset(stand_ins[value] for value in dataflow.displaced),
        state={name: stage_ranks[home_of[value]] for value, name in trace.tensors.initial.items()},
        read_in=_read_in(trace, pauses_of(trace, homes, stage_ranks, rank)),
        free_operations=_free_operations(trace, num_stages=len(local)),
        draws=any(step.draws for step in trace.steps),
        boundary=boundary,
        staying=frozenset(staying),
    )


def _free_operations(trace: Trace, *, num_stages: int) -> FreeOperations:
    graph = trace.graph
    read = {name for node in graph.nodes if node.kind == "op" for name in node.parameters}
    reads_buffers = trace.tensors.initial or any(graph.parameters[name].is_buffer for name in read)
    changes = (change for step in trace.steps for change in (*step.changes, *step.bases))
    if reads_buffers or any(change.before is None for change in changes):
        return FreeOperations.AS_TRACED
    takes_turns = num_stages != 1
    return FreeOperations.FEWER if takes_turns or trace.recomputes else FreeOperations.ANY


def _read_in(trace: Trace, pauses: Sequence[int]) -> dict[tuple[int, str], int]:
    reads = {(id(use.module), use.key): use.first_read for use in trace.effects.attributes}
    return {
        place: sum(pause < read.before for pause in pauses)
        for place, read in reads.items()
        if read is not None
    }


def _read_after_backward(trace: Trace) -> frozenset[int]:
    if trace.backward_at is None:
        return frozenset()
    return frozenset(value for step in trace.steps[trace.backward_at :] for value in step.inputs)

"""What one rank does at each step of a traced step function.

Every node of the graph has a home (see `homes`). A value crosses stages once for each other stage that reads
it::

      stage 0              stage 1                     instruction on the rank of stage 1
    ┌───────────┐        ┌───────────┐
    │ v0 = wte  │        │           │                  wte, add, h.0:   ELSEWHERE (give deferred tensors)
    │ v1 = add  │        │           │
    │ v2 = h.0  │──v2───▶│ v3 = h.1  │                  h.1:  HERE, with input v2 received: a leaf of autograd
    └───────────┘        └───────────┘
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.model_graph import TensorSpec
from shardwright.schedule import Edge
from shardwright.torch.attribute_use import AttributeUse
from shardwright.torch.dataflow import Dataflow, StepFlow
from shardwright.torch.homes import home_stages
from shardwright.torch.layout import Order
from shardwright.torch.program_checks import (
    check_after_backward,
    check_attributes,
    check_counters,
    check_generators,
    check_lasting_tensors,
    check_python_draws,
    pauses_of,
)
from shardwright.torch.recording import Step, Trace
from shardwright.torch.rng import Draw, own_generators
from shardwright.torch.tree import Structure

__all__ = [
    "Crossing",
    "Instruction",
    "Place",
    "Program",
    "build_program",
    "generators_of",
    "merged_edges",
]


class Place(IntEnum):
    """Where a step is executed."""

    FREE = 0
    HERE = 1
    ELSEWHERE = 2


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage makes and another reads.

    Attributes:
        value: index in the graph.
        source: stage that makes it.
        target: stage that reads it.
        spec: shape and type.
        has_gradient: a gradient comes back.
        detached: none does, as the units that read it gave none in the trace.
        order: of its dims in memory, where that is not their own; of its gradient's, too.
    """

    value: int
    source: int
    target: int
    spec: TensorSpec
    has_gradient: bool
    detached: bool = False
    order: Order | None = None

    @property
    def message_shape(self) -> tuple[int, ...]:
        """Its sizes in the order of memory, in which it is sent."""
        return self.spec.shape if self.order is None else tuple(self.spec.shape[dim] for dim in self.order)


@dataclass(slots=True)
class Instruction:
    """One step, as this rank executes it.

    Attributes:
        func: the torch function or unit expected here.
        place: on this rank, on another, or on all.
        stage: home of the node.
        flow: where its tensors come from, and which are kept.
        structure: structure of the result, for a rank that does not execute it.
        result: its leaves.
        passed: (position in the result, position in the arguments).
        line: where in the user's code.
        draws: random numbers that it takes.
        looks_at_values: so it may take other random numbers than in the trace.
        recompute: drop its activations, and compute them again in the backward.
        numbers: (position in the result, value) of what other ranks know from the trace alone.
        attributes: where the unit leaves tensors: (module, name, what stands for the tensor elsewhere).
        passed_attributes: where it leaves free arguments: (module, name, position in the arguments).
        leaves: attributes that change inside the unit, which its backward may look at.
        shapes: (position in the result, value) of tensors whose shape other ranks know from the trace alone.
        expects: (position among the leaves of the arguments, value that a stand-in there names, whether there
            must be a stand-in).
        flat: its arguments are the leaves themselves, all given by position.
        fills: the unit is given containers that units change.
        finds: attributes inside the unit that the step function sets, for a recomputation to find again.
    """

    func: Any
    place: Place
    stage: int = -1
    flow: StepFlow = field(default_factory=StepFlow)
    structure: Structure | None = None
    result: tuple[Any, ...] = ()
    passed: tuple[tuple[int, int], ...] = ()
    line: str = ""
    draws: tuple[Draw, ...] = ()
    looks_at_values: bool = False
    recompute: bool = False
    numbers: tuple[tuple[int, Any], ...] = ()
    attributes: tuple[tuple[nn.Module, str, Tensor], ...] = ()
    passed_attributes: tuple[tuple[nn.Module, str, int], ...] = ()
    leaves: tuple[tuple[nn.Module, str], ...] = ()
    shapes: tuple[tuple[int, int], ...] = ()
    expects: tuple[tuple[int, int, bool], ...] = ()
    flat: bool = False
    fills: bool = False
    finds: tuple[tuple[nn.Module, str], ...] = ()


@dataclass(slots=True)
class Program:
    """Everything that one pipeline rank needs to run microbatches of one signature.

    Attributes:
        instructions: one for each step of the trace.
        crossings: (source, target) -> values, for all ranks.
        sends: stage of this rank -> crossings that leave it, by target.
        receives: stage of this rank -> crossings that enter it, by source.
        loss: value given to backward.
        loss_stage: its home.
        backward_at: number of instructions before backward.
        home_of: value -> home stage.
        specs: value -> shape and type.
        stage_ranks: stage -> pipeline rank.
        stages: the stages of this rank, ascending.
        result_values: (position among the leaves of the returned tree, value).
        kept: values that are needed when the backward of their stage has ended.
        read_late: those among them that steps behind ``backward`` read.
        flops: of the forward, all stages together.
        recomputes: the step function itself recomputes activations around units.
        changes_batch: the step function changes tensors of its batch in place.
        temporary_hooks: the step function registers hooks and removes them again.
        state: buffers that the step function changes -> pipeline rank of their home.
        attributes: attributes of modules that it changes.
        read_in: attribute (id of the module, name) that is read before it is written -> how often a
            microbatch has paused on this rank by then.
        draws_of_python: random numbers of Python or NumPy are drawn between units.
        changes_free_tensors: operations that have a place change tensors that every rank has, or the content
            of buffers: by its arguments alone, an operation cannot be told to be free.
        takes_unknown: microbatches may do free operations that the trace does not have: what they keep for
            later is found by the others in the order of a plain loop. Not where microbatches take turns, and
            not where the backward runs code of the step function again.
        stand_ins: of each value, the one that its stand-in names; None where every rank has the tensor.
        as_planned: each parameter that the plan has a stage for is used by these stages alone.
    """

    instructions: list[Instruction]
    crossings: Mapping[tuple[int, int], tuple[Crossing, ...]]
    sends: Mapping[int, tuple[Crossing, ...]]
    receives: Mapping[int, tuple[Crossing, ...]]
    loss: int | None
    loss_stage: int | None
    backward_at: int | None
    home_of: tuple[int, ...]
    specs: tuple[TensorSpec, ...]
    stage_ranks: tuple[int, ...]
    stages: tuple[int, ...]
    result_values: tuple[tuple[int, int], ...]
    kept: frozenset[int]
    read_late: frozenset[int]
    flops: int
    recomputes: bool
    changes_batch: bool
    temporary_hooks: bool
    state: Mapping[str, int]
    attributes: tuple[AttributeUse, ...]
    read_in: Mapping[tuple[int, str], int]
    draws_of_python: bool
    changes_free_tensors: bool
    takes_unknown: bool
    stand_ins: tuple[int | None, ...]
    as_planned: bool = True

    @property
    def draws(self) -> bool:
        """Whether a microbatch takes random numbers."""
        return any(instruction.draws for instruction in self.instructions)


def generators_of(programs: Iterable[Program]) -> tuple[torch.Generator, ...]:
    """Generators of the script's own that microbatches draw from, in the same order on all ranks."""
    return own_generators(
        draw for program in programs for instruction in program.instructions for draw in instruction.draws
    )


def merged_edges(programs: Sequence[Program]) -> list[Edge]:
    """Transfers between stages for lowering and simulation: those of any of the microbatches.

    Bytes are those of the largest microbatch.
    """
    pairs = sorted({pair for program in programs for pair in program.crossings})
    edges = []
    for source, target in pairs:
        groups = [program.crossings.get((source, target), ()) for program in programs]
        gradient_bytes = max(sum(c.spec.num_bytes for c in group if c.has_gradient) for group in groups)
        edges.append(
            Edge(
                source=source,
                target=target,
                num_bytes=max(sum(c.spec.num_bytes for c in group) for group in groups),
                gradient_bytes=gradient_bytes,
                has_gradient=gradient_bytes > 0,
            )
        )
    return edges


def build_program(
    trace: Trace,
    *,
    stage_of_call: Mapping[int, int],
    stage_ranks: Sequence[int],
    rank: int,
    recompute: frozenset[str] = frozenset(),
) -> Program:
    """Works out what a rank computes, sends and receives.

    Args:
        trace: the traced step function.
        stage_of_call: stage of every node that calls a unit.
        stage_ranks: pipeline rank of each stage.
        rank: this pipeline rank.
        recompute: labels of the unit calls whose activations are recomputed.
    """
    graph = trace.graph
    homes = home_stages(graph, stage_of_call, stage_ranks)
    home_of = tuple(homes[value.producer] for value in graph.values)
    dataflow = Dataflow(trace, homes, home_of)
    crossings = _crossings(trace, dataflow, homes)
    check_after_backward(trace, homes, home_of)
    if len(stage_ranks) > 1:
        check_lasting_tensors(trace)
    check_counters(trace, homes, stage_ranks)
    check_attributes(trace, homes, stage_ranks)
    check_python_draws(trace, homes, stage_ranks)
    check_generators(trace)
    local = tuple(stage for stage, owner in enumerate(stage_ranks) if owner == rank)
    read_late = _read_after_backward(trace)
    return Program(
        instructions=_instructions(trace, dataflow, homes, stage_ranks, rank, recompute),
        crossings=crossings,
        sends={
            s: tuple(c for (a, _), group in sorted(crossings.items()) if a == s for c in group) for s in local
        },
        receives={
            s: tuple(c for (_, b), group in sorted(crossings.items()) if b == s for c in group) for s in local
        },
        loss=graph.loss,
        loss_stage=None if graph.loss is None else home_of[graph.loss],
        backward_at=trace.backward_at,
        home_of=home_of,
        specs=tuple(value.spec for value in graph.values),
        stage_ranks=tuple(stage_ranks),
        stages=local,
        result_values=trace.result_values,
        kept=read_late.union(graph.outputs),
        read_late=read_late,
        flops=sum(node.flops for node in graph.nodes),
        recomputes=trace.recomputes,
        changes_batch=trace.changes_batch,
        temporary_hooks=trace.temporary_hooks,
        state={name: stage_ranks[home_of[value]] for value, name in trace.initial.items()},
        attributes=trace.attributes,
        read_in=_read_in(trace, pauses_of(trace, homes, stage_ranks, rank)),
        changes_free_tensors=_changes_free_tensors(trace),
        draws_of_python=bool(trace.python_draws),
        takes_unknown=len(local) == 1 and not trace.recomputes,
        stand_ins=trace.stand_ins,
    )


def _changes_free_tensors(trace: Trace) -> bool:
    return bool(trace.initial) or any(
        change.before is None for step in trace.steps for change in (*step.changes, *step.bases)
    )


def _crossings(
    trace: Trace, dataflow: Dataflow, homes: Sequence[int]
) -> dict[tuple[int, int], tuple[Crossing, ...]]:
    graph = trace.graph
    found: dict[tuple[int, int], dict[int, Crossing]] = {}
    contributes = graph.contributing()
    for value, reader in dataflow.crossings:
        source, target = dataflow.home_of[value], homes[reader]
        spec = graph.values[value].spec
        pair = found.setdefault((source, target), {})
        gradient = spec.requires_grad and graph.loss is not None and reader in contributes
        detached = value in graph.nodes[reader].detached
        before = pair.get(value)
        has_gradient = (before is not None and before.has_gradient) or (gradient and not detached)
        pair[value] = Crossing(
            value,
            source,
            target,
            spec,
            has_gradient,
            detached=not has_gradient and gradient and detached,
            order=trace.orders.get(value),
        )
    return {pair: tuple(group[value] for value in sorted(group)) for pair, group in found.items()}


def _instructions(
    trace: Trace,
    dataflow: Dataflow,
    homes: Sequence[int],
    stage_ranks: Sequence[int],
    rank: int,
    recompute: frozenset[str],
) -> list[Instruction]:
    instructions = []
    for step, flow in zip(trace.steps, dataflow.flows, strict=True):
        instruction = _instruction(step, flow, homes, stage_ranks, rank)
        node = None if step.node is None else trace.graph.nodes[step.node]
        wanted = node is not None and node.kind == "unit" and node.label in recompute
        instruction.expects = _expected(trace, step, homes, stage_ranks, rank)
        instruction.flat = step.flat
        instruction.shapes = tuple((p, value) for p, value in step.writes if value in trace.shapes_asked)
        # Where it changes its inputs, they are not what they were.
        instruction.recompute = wanted and not step.changes and not step.recomputed
        if trace.left_in_units and instruction.place is Place.HERE and isinstance(step.func, nn.Module):
            inside = set(step.func.modules())
            instruction.leaves = tuple(place for place in trace.left_in_units if place[0] in inside)
        if trace.attributes and instruction.recompute and isinstance(step.func, nn.Module):
            inside = set(step.func.modules())
            instruction.finds = tuple(
                (use.module, use.key) for use in trace.attributes if use.module in inside
            )
        instructions.append(instruction)
    return instructions


def _expected(
    trace: Trace, step: Step, homes: Sequence[int], stage_ranks: Sequence[int], rank: int
) -> tuple[tuple[int, int, bool], ...]:
    found = []
    for position, value in step.reads:
        stand_in = trace.stand_ins[value]
        if stand_in is not None:
            made_here = stage_ranks[homes[trace.graph.values[value].producer]] == rank
            found.append((position, stand_in, not made_here and stand_in == value))
    return tuple(found)


def _instruction(
    step: Step, flow: StepFlow, homes: Sequence[int], stage_ranks: Sequence[int], rank: int
) -> Instruction:
    if step.node is None:
        return Instruction(func=step.func, place=Place.FREE, draws=step.draws)
    stage = homes[step.node]
    return Instruction(
        func=step.func,
        place=Place.HERE if stage_ranks[stage] == rank else Place.ELSEWHERE,
        stage=stage,
        flow=flow,
        structure=step.structure,
        result=step.result,
        passed=step.passed,
        line=step.line,
        draws=step.draws,
        looks_at_values=step.looks_at_values,
        numbers=step.numbers,
        attributes=step.attributes,
        passed_attributes=step.passed_attributes,
        fills=step.fills,
    )


def _read_in(trace: Trace, pauses: Sequence[int]) -> dict[tuple[int, str], int]:
    reads = {(id(use.module), use.key): use.first_read for use in trace.attributes}
    return {
        place: sum(pause < read.before for pause in pauses)
        for place, read in reads.items()
        if read is not None
    }


def _read_after_backward(trace: Trace) -> frozenset[int]:
    if trace.backward_at is None:
        return frozenset()
    return frozenset(value for step in trace.steps[trace.backward_at :] for value in step.inputs)

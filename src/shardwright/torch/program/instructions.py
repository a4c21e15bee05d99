"""The instructions of a rank, one for each step of a traced step function."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from torch import Tensor, nn

from shardwright.runtime.dataflow import Dataflow, StepFlow
from shardwright.torch.interception.attribute_inputs import FoundPlace, found_places
from shardwright.torch.pytorch.tree import Structure
from shardwright.torch.randomness.rng import Draw
from shardwright.torch.tracing.trace_data import Step, Trace

__all__ = ["Instruction", "Place", "instructions_of"]


class Place(IntEnum):
    """Where a step is executed."""

    FREE = 0
    HERE = 1
    ELSEWHERE = 2


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
        found: attributes inside the unit whose tensors are its last arguments.
        own_results: positions of results of the unit that its next call overwrites.
        finds: attributes inside the unit that the step function sets, for a recomputation to find again.
        values: position among the leaves of the result, and of `attributes` behind them -> value.
        spoils: positions of arguments that every rank has, and of which only one has what they become.
        changes: values that it changes in place, as their stand-ins name them, where step code may read them.
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
    found: tuple[FoundPlace, ...] = ()
    own_results: tuple[int, ...] = ()
    finds: tuple[tuple[nn.Module, str], ...] = ()
    values: Mapping[int, int] = field(default_factory=dict)
    spoils: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()

    @property
    def num_results(self) -> int:
        """Leaves of the result."""
        return len(self.result)


def instructions_of(
    trace: Trace,
    dataflow: Dataflow,
    homes: Sequence[int],
    stage_ranks: Sequence[int],
    rank: int,
    recompute: frozenset[str],
) -> list[Instruction]:
    """One for each step of a trace.

    Args:
        trace: the traced step function.
        dataflow: what becomes of its values.
        homes: stage of each node.
        stage_ranks: pipeline rank of each stage.
        rank: this pipeline rank.
        recompute: labels of the unit calls whose activations are recomputed.
    """
    instructions = []
    for step, flow in zip(trace.steps, dataflow.flows, strict=True):
        instruction = _instruction(step, flow, homes, stage_ranks, rank)
        node = None if step.node is None else trace.graph.nodes[step.node]
        wanted = node is not None and node.kind == "unit" and node.label in recompute
        instruction.expects = _expected(trace, step, homes, stage_ranks, rank)
        instruction.flat = step.flat
        instruction.own_results = step.own_results
        if step.found:
            instruction.found = found_places(step.func, step.found)
        if trace.ends:
            before = (change.before for change in step.changes)
            names = (None if value is None else trace.stand_ins[value] for value in before)
            instruction.changes = tuple(name for name in names if name is not None)
        instruction.shapes = tuple((p, value) for p, value in step.writes if value in trace.shapes_asked)
        # Where it changes its inputs, they are not what they were.
        instruction.recompute = wanted and not step.changes and not step.recomputed
        if trace.left_in_units and instruction.place is Place.HERE and isinstance(step.func, nn.Module):
            inside = set(step.func.modules())
            instruction.leaves = tuple(place for place in trace.left_in_units if place[0] in inside)
        if trace.attributes and instruction.recompute and isinstance(step.func, nn.Module):
            inside = set(step.func.modules())
            instruction.finds = tuple(
                (use.module, use.key)
                for use in trace.attributes
                if isinstance(use.module, nn.Module) and use.module in inside
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
        values=dict(step.writes),
        spoils=_spoilt(step, flow),
    )


def _spoilt(step: Step, flow: StepFlow) -> tuple[int, ...]:
    changed = (change.position for change in step.changes if change.before is None)
    return (*(place for place in changed if place is not None), *(place for place, _ in flow.buffers))

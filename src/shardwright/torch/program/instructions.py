"""The instructions of a rank, one for each step of a traced step function."""

from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import IntEnum

from torch import nn

from shardwright.runtime.dataflow import Dataflow, StepFlow
from shardwright.runtime.homes import Assignment
from shardwright.torch.interception.unit_attributes import FoundPlace, found_places
from shardwright.torch.pytorch.tree import Slot
from shardwright.torch.tracing.divided_tail import DividedTail
from shardwright.torch.tracing.trace_data import Step, Trace


class Place(IntEnum):
    """The ranks that execute a step."""

    FREE = 0
    HERE = 1
    ELSEWHERE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class _UnitAttributes:
    """Attributes of modules inside a unit that its call uses besides its arguments.

    Attributes:
        arguments: those whose tensors are its last arguments.
        set_before: those that the step function sets, for a recomputation to find again.
        left: those that change inside the unit, which its backward may look at.
    """

    arguments: tuple[FoundPlace, ...] = ()
    set_before: tuple[Slot, ...] = ()
    left: tuple[Slot, ...] = ()


_NO_ATTRIBUTES = _UnitAttributes()


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptOtherwise:
    """The calls of units whose activations are not kept as they are, by label.

    Attributes:
        offload: those that offload what they keep.
    """

    recompute: frozenset[str] = frozenset()
    offload: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """One step, as this rank executes it.

    Attributes:
        step: of the trace: what is called, and what other ranks return for it.
        divided: ranks share parameters that it uses, or tensors between units; what it gives others is placed
            as these are (see `Boundary`).
        stays: positions in the result of tensors that stay as ranks have them, for operations behind a unit.
        shapes: (position in the result, value) of tensors whose shape other ranks know from the trace alone.
        expects: (position among the leaves of the arguments, value that a stand-in there names, whether there
            must be a stand-in).
        values: position among the leaves of the result, and of the unit's attributes behind them -> value.
        spoils: positions of arguments that every rank has, and of which only one has what they become.
        changes: values that it changes in place, as their stand-ins name them, where step code may read them.
    """

    step: Step
    place: Place
    stage: int = -1
    flow: StepFlow = field(default_factory=StepFlow)
    recompute: bool = False
    divided: bool = False
    stays: tuple[int, ...] = ()
    offload: bool = False
    attributes: _UnitAttributes = _NO_ATTRIBUTES
    shapes: tuple[tuple[int, int], ...] = ()
    expects: tuple[tuple[int, int, bool], ...] = ()
    values: Mapping[int, int] = field(default_factory=dict)
    spoils: tuple[int, ...] = ()
    changes: tuple[int, ...] = ()

    @property
    def staying(self) -> Iterator[int]:
        """The values of the tensors that stay."""
        return (self.values[position] for position in self.stays if position in self.values)


def instructions_of(
    trace: Trace,
    dataflow: Dataflow,
    assignment: Assignment,
    *,
    rank: int,
    kept: KeptOtherwise,
    divided: frozenset[str],
    cuts_between: bool,
    tails: Mapping[int, DividedTail],
) -> list[Instruction]:
    divided_nodes, staying = _divided(trace, divided, tails)
    if cuts_between:
        divided_nodes = set(range(len(trace.graph.nodes)))
    return [
        _instruction(trace, step, flow, assignment, rank, kept, divided_nodes, staying)
        for step, flow in zip(trace.steps, dataflow.flows, strict=True)
    ]


def _divided(
    trace: Trace, divided: frozenset[str], tails: Mapping[int, DividedTail]
) -> tuple[set[int], set[int]]:
    """The nodes whose tensors ranks share, and the values that stay as they have them."""
    nodes, staying = set[int](), set[int]()
    for number, node in enumerate(trace.graph.nodes):
        of_unit = trace.graph.units[node.name].parameters if node.kind == "unit" else ()
        if divided.isdisjoint((*of_unit, *node.parameters)):
            continue
        nodes.add(number)
        if number in tails:
            nodes.update(tails[number].nodes)
            staying.update(tails[number].values)
    return nodes, staying


def _instruction(
    trace: Trace,
    step: Step,
    flow: StepFlow,
    assignment: Assignment,
    rank: int,
    kept: KeptOtherwise,
    divided: AbstractSet[int],
    staying: AbstractSet[int],
) -> Instruction:
    if step.node is None:
        return Instruction(step=step, place=Place.FREE)
    node, stage = trace.graph.nodes[step.node], assignment.homes[step.node]
    is_here = assignment.stage_ranks[stage] == rank
    # Where it changes its inputs, they are not what they were.
    may_choose = node.kind == "unit" and not step.unit.recomputed
    recomputes = may_choose and node.label in kept.recompute and not step.changes
    asked = trace.tensors.shapes_asked
    return Instruction(
        step=step,
        place=Place.HERE if is_here else Place.ELSEWHERE,
        stage=stage,
        flow=flow,
        recompute=recomputes,
        divided=is_here and step.node in divided,
        stays=tuple(_staying(step, staying)) if is_here else (),
        offload=may_choose and node.label in kept.offload,
        attributes=_attributes(trace, step, is_here=is_here, recomputes=recomputes),
        shapes=tuple((position, value) for position, value in step.writes if value in asked),
        expects=_expected(trace, step, assignment, rank),
        values=dict(step.writes),
        spoils=_spoilt(step, flow),
        changes=_changed(trace, step) if trace.ends else (),
    )


def _staying(step: Step, values: AbstractSet[int]) -> Iterator[int]:
    """Positions in the result of some values, whether the step has made them or gives them back."""
    given = dict(step.reads)
    yield from (position for position, value in step.writes if value in values)
    yield from (position for position, source in step.result.passed if given.get(source) in values)


def _attributes(trace: Trace, step: Step, *, is_here: bool, recomputes: bool) -> _UnitAttributes:
    left, uses = trace.effects.left_in_units, trace.effects.attributes
    if not isinstance(step.func, nn.Module) or not (left or uses or step.unit.found):
        return _NO_ATTRIBUTES
    inside = set(step.func.modules())
    set_before = ((use.module, use.key) for use in uses if isinstance(use.module, nn.Module))
    return _UnitAttributes(
        arguments=found_places(step.func, step.unit.found) if step.unit.found else (),
        set_before=tuple(place for place in set_before if place[0] in inside) if recomputes else (),
        left=tuple(place for place in left if place[0] in inside) if is_here else (),
    )


def _expected(
    trace: Trace, step: Step, assignment: Assignment, rank: int
) -> tuple[tuple[int, int, bool], ...]:
    homes, found = assignment.homes, []
    for position, value in step.reads:
        stand_in = trace.tensors.stand_ins[value]
        if stand_in is not None:
            made_here = assignment.stage_ranks[homes[trace.graph.values[value].producer]] == rank
            found.append((position, stand_in, not made_here and stand_in == value))
    return tuple(found)


def _spoilt(step: Step, flow: StepFlow) -> tuple[int, ...]:
    changed = (change.position for change in step.changes if change.before is None)
    return (*(place for place in changed if place is not None), *(place for place, _ in flow.buffers))


def _changed(trace: Trace, step: Step) -> tuple[int, ...]:
    before = (change.before for change in step.changes)
    names = (None if value is None else trace.tensors.stand_ins[value] for value in before)
    return tuple(name for name in names if name is not None)

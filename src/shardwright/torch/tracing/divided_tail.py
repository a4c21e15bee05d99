"""Finds the operations behind a unit that compute on the parts that ranks have of its result: a loss.

A head whose vocabulary ranks share leaves each of them its own columns of the logits. What a loss does with
them needs no others: a maximum and a sum over the ranks, of a number a token::

    head ──► logits, cut ──► float ──► view ──► cross_entropy ──► loss, whole
                 └── returned by the step function: gathered at its end

Everywhere else between units, tensors are whole, or cut along the batch or the sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from shardwright.model_graph import ModelGraph
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tracing.trace_data import Sample, Step, Trace

_ON_PARTS = frozenset(
    "__getitem__ __mul__ __rmul__ __truediv__ bfloat16 clone contiguous detach div divide double flatten "
    "float half log_softmax movedim mul multiply narrow permute reshape select softmax squeeze tanh to "
    "transpose true_divide type unflatten unsqueeze view".split()
)
"""Functions that compute a part of their result from a part of their argument."""

_ENDS = frozenset("cross_entropy cross_entropy_loss nll_loss nll_loss_nd".split())
"""Functions that make something small of it."""


@dataclass(frozen=True, slots=True)
class DividedTail:
    """Operations behind a unit that ranks compute on their parts of its results.

    Attributes:
        values: that stay as ranks have them: results of the unit, and of operations that others take.
        returned: those of the values that the step function returns.
        leaving: results of the operations that others get whole.
    """

    unit: int
    nodes: tuple[int, ...]
    steps: tuple[int, ...]
    values: frozenset[int]
    returned: tuple[int, ...]
    leaving: tuple[int, ...]


def divided_tails(trace: Trace) -> dict[int, DividedTail]:
    """The tail of each unit that has one, by the node of the unit."""
    # Code that reads values, or runs again in the backward, may ask for more than it did in the trace.
    if trace.ends or trace.recomputes:
        return {}
    finder = _Finder(trace)
    found = ((step.node, finder.tail(step)) for step in trace.steps if step.node is not None)
    return {node: tail for node, tail in found if tail is not None}


class _Finder:
    """Looks for the tails of one trace."""

    def __init__(self, trace: Trace):
        self._graph: ModelGraph = trace.graph
        self._steps = trace.steps
        self._consumers = trace.graph.consumers()
        self._homes = trace.graph.home_calls()
        self._step_of = {step.node: at for at, step in enumerate(trace.steps) if step.node is not None}
        changes = (change for step in trace.steps for change in (*step.changes, *step.bases))
        self._changed = {change.before for change in changes}
        if trace.backward_at is not None:
            late = trace.steps[trace.backward_at :]
            self._changed |= {value for step in late for value in step.inputs}

    def tail(self, step: Step) -> DividedTail | None:
        """The tail of a step, if it is the only call of a unit and has one."""
        assert step.node is not None
        if not self._may_have_tail(step):
            return None
        of_unit = {value for _, value in step.writes}
        values, before = self._reached(of_unit), set[int]()
        while values != before:
            before = values
            staying = {value for value in values if self._stays(value, values)}
            values = self._reached(of_unit & staying) & staying
        nodes = sorted({reader for value in values for reader in self._consumers[value]})
        if not any(self._graph.nodes[node].name in _ENDS for node in nodes):
            return None
        made = (value for node in nodes for value in self._graph.nodes[node].outputs)
        return DividedTail(
            unit=step.node,
            nodes=tuple(nodes),
            steps=tuple(self._step_of[node] for node in nodes),
            values=frozenset(values),
            returned=tuple(sorted(values.intersection(self._graph.outputs))),
            leaving=tuple(value for value in made if value not in values),
        )

    def _may_have_tail(self, step: Step) -> bool:
        assert step.node is not None
        node, call = self._graph.nodes[step.node], step.unit
        if node.kind != "unit" or self._graph.units[node.name].num_calls != 1:
            return False
        leaves_otherwise = call.attributes or call.passed_attributes or call.fills or call.own_results
        return not (leaves_otherwise or call.shared_results or call.recomputed or step.changes)

    def _reached(self, values: set[int]) -> set[int]:
        """Values, and what operations make of them part by part."""
        found = set(values)
        for node in self._graph.nodes:
            if node.kind == "op" and node.name in _ON_PARTS and not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    def _stays(self, value: int, others: set[int]) -> bool:
        """Whether nothing needs a value whole."""
        if value in self._changed or value == self._graph.loss:
            return False
        home = self._homes[self._graph.values[value].producer]
        return all(self._takes_parts(reader, home, others) for reader in self._consumers[value])

    def _takes_parts(self, reader: int, home: int | None, values: set[int]) -> bool:
        """Whether a node computes on parts, at home with the unit, and gradients flow to parts alone."""
        node = self._graph.nodes[reader]
        step = self._steps[self._step_of[reader]]
        if node.kind != "op" or self._homes[reader] != home or node.parameters or step.draws:
            return False
        beside = (self._graph.values[each].spec for each in node.inputs if each not in values)
        if any(spec.requires_grad for spec in beside):
            return False
        return node.name in _ENDS or (node.name in _ON_PARTS and values.issuperset(node.outputs))


@dataclass(slots=True)
class TailRun:
    """Runs a tail behind its unit, to see what ranks exchange there.

    Attributes:
        inside: the tensors that stayed as they were, once it has run.
    """

    tail: DividedTail
    trace: Trace
    like: Callable[[Any], Any]
    inside: list[Tensor] = field(default_factory=list)
    _arguments: dict[int, tuple[Sample, list[Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for number in self.tail.steps:
            step = self.trace.steps[number]
            assert step.node is not None
            sample = self.trace.samples[self.trace.graph.nodes[step.node].cost_class]
            own = {position for position, value in step.reads if value in self.tail.values}
            items = [item if place in own else self.like(item) for place, item in enumerate(sample.leaves)]
            self._arguments[number] = sample, items

    def __call__(self, result: Any) -> Sequence[Tensor]:
        unit = next(step for step in self.trace.steps if step.node == self.tail.unit)
        made = _written(unit, result)
        for number in self.tail.steps:
            step, (sample, items) = self.trace.steps[number], self._arguments[number]
            items = list(items)
            for position, value in step.reads:
                if value in made:
                    items[position] = made[value]
            args, kwargs = sample.structure.rebuild(items)
            made |= _written(step, sample.func(*args, **kwargs))
        self.inside = [made[value] for value in sorted(self.tail.values)]
        beside = [value for _, value in unit.writes if value not in self.tail.values]
        return [
            *(made[value] for value in (*beside, *self.tail.leaving)),
            *(made[value].detach() for value in self.tail.returned),
        ]


def _written(step: Step, result: Any) -> dict[int, Tensor]:
    items = leaves(result) if not isinstance(result, Tensor) else [result]
    return {value: items[position] for position, value in step.writes}

"""Writes down the calls of a traced step function: the steps, and the nodes of the graph."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import DeferredReadError, UsageError
from shardwright.model_graph import Node, Together, Value
from shardwright.torch._private.tensors import FakeTensor, storage_key
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.python_state.shared_state import Filled
from shardwright.torch.pytorch.modules import outermost_checkpoint, user_line
from shardwright.torch.pytorch.tree import Structure, flatten
from shardwright.torch.tracing.hidden_inputs import HiddenInputs
from shardwright.torch.tracing.together import (
    BufferWatch,
    Regions,
    TracedBuffers,
    counters_together,
    gradient_together,
    parameters_together,
)
from shardwright.torch.tracing.trace_data import Step, StepResult, UnitCall
from shardwright.torch.tracing.traced_call import Outcome, TracedCall, TracedChanges, is_opaque
from shardwright.torch.tracing.traced_values import TracedValues


@dataclass(frozen=True, slots=True)
class _CallResults:
    """The result of a call, and the tensors that it left in attributes of a unit.

    Attributes:
        leaves: of the result: deferred tensors in place of fake ones, and arguments that are passed on.
        passed: position among the leaves -> position of the argument that is passed on.
        attributes: where a unit leaves tensors: (module, name, what another rank finds there).
        writes: (position among the leaves, and the attributes behind them, value) of what is new.
    """

    structure: Structure
    leaves: tuple[Any, ...]
    passed: dict[int, int]
    attributes: tuple[tuple[nn.Module, str, Tensor], ...]
    writes: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, call: TracedCall, outcome: Outcome, values: TracedValues, node: int) -> "_CallResults":
        """Gives a value to every new tensor."""
        sources = {id(item): position for position, item in enumerate(call.items) if is_opaque(item)}
        sources |= {id(fake): p for p, fake in enumerate(call.fakes) if isinstance(fake, Tensor)}
        results, structure = flatten(outcome.output)
        returned: list[Any] = []
        writes: list[tuple[int, int]] = []
        passed: dict[int, int] = {}
        holders: dict[int, Any] = {}
        for position, result in enumerate(results):
            if id(result) in holders:  # given back twice: one value
                returned.append(holders[id(result)])
            elif id(result) in sources:
                passed[position] = sources[id(result)]
                returned.append(call.items[passed[position]])
            elif isinstance(result, Tensor):
                value = values.new(node, len(writes), values.as_fake(result))
                writes.append((position, value))
                returned.append(holders.setdefault(id(result), values[value].holder))
            else:
                returned.append(result)
        left: list[tuple[nn.Module, str, Tensor]] = []
        for module, key, fake in outcome.attributes:
            # Units find the fake tensor itself in the attribute, and so does the step function.
            value = values.new(node, len(writes), fake, holder=fake)
            writes.append((len(results) + len(left), value))
            left.append((module, key, DeferredTensor(fake, value)))
        return cls(structure, tuple(returned), passed, tuple(left), tuple(writes))

    def here(self) -> Any:
        """The result as the step function gets it in the trace."""
        return self.structure.rebuild(self.leaves)

    def elsewhere(self) -> StepResult:
        """The result as a rank returns it that does not execute the call."""
        return StepResult(
            structure=self.structure.without_template(),
            leaves=tuple(None if at in self.passed else item for at, item in enumerate(self.leaves)),
            passed=tuple(self.passed.items()),
        )


class TraceRecorder:
    """The steps of a trace, in order of execution.

    Attributes:
        batch_memory: memory of the microbatch: that it is saved takes no further memory.
    """

    def __init__(self, values: TracedValues, buffers: TracedBuffers, was_there: Callable[[Tensor], bool]):
        self.steps: list[Step] = []
        self.batch_memory: set[int] = set()
        self.loss: int | None = None
        self.backward_at: int | None = None
        self._values = values
        self._buffers = buffers
        self._nodes: list[Node] = []
        self._changes = TracedChanges(values, was_there)
        self._regions = Regions()
        self._gradients: dict[int, bool] = {}
        self._units_write: dict[int, set[int]] = {}  # memory that units hold -> nodes

    @property
    def num_nodes(self) -> int:
        return len(self._nodes)

    @property
    def position(self) -> float:
        """Number of steps so far, and a quarter more behind ``backward``."""
        return len(self.steps) + (0.0 if self.backward_at is None else 0.25)

    # ---- calls ----

    def reads(self, items: list[Any]) -> list[tuple[int, int]]:
        """The values among the leaves of arguments: (position, value)."""
        found = []
        for position, item in enumerate(items):
            value = self._values.find(item)
            if value is None and isinstance(item, Tensor):
                value = self._buffers.first_read(item, len(self._nodes))
                if value is None:
                    value = self._changes.under_another_name(item)
            if value is not None:
                found.append((position, value))
            elif isinstance(item, FakeTensor) and id(item) not in self._values.lent_for:
                raise DeferredReadError(
                    f"{user_line()}: a tensor that was made inside a unit left it by another way than as its "
                    "result (through an attribute, a list, a hook of a module inside it). Make it part of "
                    "what the module returns, or keep it in an attribute of the module: module.seen = tensor."
                )
            elif isinstance(item, DeferredTensor):
                raise UsageError(
                    f"{user_line()}: a tensor of an earlier call of a step function is used here. Its "
                    "data is on another rank and gone: return what you need from the step function as a "
                    "StepOutput."
                )
        return found

    def free_step(self, func: Any, items: list[Any]) -> Step:
        """Adds a step that every rank executes."""
        step = Step(func=func, node=None, counters=self._buffers.counters_among(items))
        self.steps.append(step)
        return step

    def record(
        self,
        node: Node,
        call: TracedCall,
        outcome: Outcome,
        unit: UnitCall | None = None,
    ) -> Any:
        index = len(self._nodes)
        self._note_region(index)
        self._note_gradient(index, call)
        changed_parameters = *self._changes.parameters(call, outcome), *outcome.written_names
        changes = self._changes.of_call(index, call, outcome)
        results = _CallResults.of(call, outcome, self._values, index)
        self._nodes.append(self._with_outputs(node, results, outcome))
        step = Step(
            func=call.func,
            node=index,
            line=node.line,
            draws=tuple(outcome.cost.draws),
            looks_at_values=outcome.cost.reads_data,
            reads=tuple(call.reads),
            writes=results.writes,
            changes=changes,
            result=results.elsewhere(),
            unit=UnitCall() if unit is None else _completed(unit, results, outcome),
            changed_parameters=changed_parameters,
            given_counters=bool(self._buffers.counters_among(call.items)),
            flat=call.is_flat,
        )
        for tensor in outcome.written:
            self._units_write.setdefault(storage_key(tensor), set()).add(index)
        self._changes.note(step)
        self.steps.append(step)
        return results.here()

    def _with_outputs(self, node: Node, results: _CallResults, outcome: Outcome) -> Node:
        """The node of a call, with the values that it makes and those that autograd saves."""
        outputs = tuple(value for _, value in results.writes)
        outcome.cost.ignore(self.batch_memory)
        return replace(
            node,
            outputs=outputs,
            saved_bytes=outcome.cost.saved_bytes,
            saved_values=self._saved((*node.inputs, *outputs), outcome),
        )

    def pass_backward(self, loss: int | None) -> None:
        self.loss = loss
        self.backward_at = len(self.steps)

    def changes_memory_of(self, item: Tensor) -> bool:
        """Whether what comes from units went into the memory of a tensor that every rank had."""
        return self._changes.in_memory_of(item)

    def _note_region(self, node: int) -> None:
        region = outermost_checkpoint()
        if region is not None:
            self._regions.note(node, region, user_line(region))

    def _note_gradient(self, node: int, call: TracedCall) -> None:
        """Records a call of ``torch.autograd.grad``, and whether it asks for gradients of no value."""
        if call.func is torch.autograd.grad:
            asked = (item for item in call.items if isinstance(item, Tensor) and item.requires_grad)
            self._gradients[node] = any(self._values.find(item) is None for item in asked)

    def _saved(self, candidates: tuple[int, ...], outcome: Outcome) -> tuple[int, ...]:
        """The values among these that autograd keeps; of those that share memory, the first."""
        memories = (self._values.memory_of(value) for value in candidates)
        firsts = (self._values.in_memory(memory)[0] for memory in memories if outcome.cost.saves(memory))
        return tuple(dict.fromkeys(firsts))

    def buffers_behind(self, values: list[int]) -> frozenset[str]:
        """Names of the buffers whose content at the start went into these values."""
        pending, seen = list(values), set[int]()
        while pending:
            value = pending.pop()
            if value not in seen and value not in self._buffers.initial:
                pending.extend(self._nodes[self._values[value].producer].inputs)
            seen.add(value)
        initial = self._buffers.initial
        return frozenset(initial[value] for value in seen if value in initial)

    # ---- the end ----

    def share_results(self) -> None:
        """Leaves results in the memory of their units where it is changed under both names."""
        changed = {change.view.memory for step in self.steps for change in step.changes}
        several = {memory for memory, nodes in self._units_write.items() if len(nodes) > 1}
        for step in self.steps:
            own = step.unit.own_results
            memories = {self._values.memory_of(v) for p, v in step.writes if p in own}
            if memories & (changed | several):
                shared = own if memories & changed else ()
                step.unit = replace(step.unit, own_results=(), shared_results=shared)

    def forget_frames(self) -> None:
        """Releases the frames of the step function, and with them all that it had."""
        self._regions.clear()

    def together(
        self, watch: BufferWatch, held: Mapping[str, set[str]], hidden: HiddenInputs
    ) -> tuple[Together, ...]:
        """Nodes that must have one home."""
        found = [
            *self._regions.together(trains=self.loss is not None),
            *self._buffers.together(self.steps, self._nodes, watch),
        ]
        producers = {value: made.producer for value, made in enumerate(self._values)}
        trained = {value for value, made in enumerate(self._values) if made.fake.requires_grad}
        for node, deep in self._gradients.items():
            found.append(gradient_together(self._nodes, node, producers, trained, deep=deep))
        found += parameters_together(self.steps, self._nodes, held)
        found += counters_together(self.steps, self._nodes)
        found += hidden.together(self._nodes)
        return tuple(group for group in found if len(group.nodes) > 1)

    def values(self) -> tuple[Value, ...]:
        return tuple(Value(v.producer, v.position, v.spec) for v in self._values)

    def nodes(self) -> tuple[Node, ...]:
        """The nodes, with all values that they make and depend on, and the buffers that they read first."""
        nodes, initial = list(self._nodes), self._buffers.initial
        for step in self.steps:
            if step.node is not None and (step.changes or initial):
                node, after = nodes[step.node], tuple(change.after for change in step.changes)
                first = [v for v in step.inputs if v in initial and self._values[v].producer == step.node]
                nodes[step.node] = replace(
                    node,
                    inputs=tuple(value for value in step.inputs if value not in first),
                    outputs=node.outputs + after,
                    parameters=node.parameters + tuple(initial[value] for value in first),
                )
        return tuple(nodes)


def _completed(unit: UnitCall, results: _CallResults, outcome: Outcome) -> UnitCall:
    """Adds to what is known of the call of a unit what it has left, and where its results lie."""
    return replace(
        unit,
        attributes=results.attributes,
        passed_attributes=tuple(outcome.passed_attributes),
        fills=tuple(outcome.output.contents) if type(outcome.output) is Filled else (),
        own_results=outcome.own_results,
    )

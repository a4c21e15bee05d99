"""Traces a step function for one microbatch into one graph, and describes it as plain data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import tensorflow as tf

from shardwright.errors import TraceError
from shardwright.model_graph import TensorSpec
from shardwright.tensorflow import _private
from shardwright.tensorflow.recorder import Recorder
from shardwright.tensorflow.step_graph import Operation, StepGraph
from shardwright.tensorflow.units import UnitCalls

_WITHOUT_BYTES = (tf.variant, tf.resource, tf.string)


@dataclass(frozen=True, slots=True)
class Trace:
    """A step function, traced.

    Attributes:
        function: the whole step as one concrete function.
        recorder: what was noted while it was traced.
        captures: name of a placeholder -> what it stands for: a variable's handle, or a constant.
        variables: handle of each variable that the step uses, by number.
        of_handles: TensorFlow's variable by the id of its handle.
    """

    function: Any
    recorder: Recorder
    captures: Mapping[str, Any]
    variables: Sequence[Any]
    of_handles: Mapping[int, Any]

    @property
    def outputs(self) -> list[str]:
        """Names of the tensors that the step function returns."""
        return [tensor.name for tensor in self.function.outputs]

    @property
    def loss(self) -> int | None:
        """Position of the output whose gradients the step function asks for; None where none is."""
        if self.recorder.target is None:
            return None
        target = _unnamed(self.recorder.target).name
        outputs = self.function.outputs
        return next((at for at, each in enumerate(outputs) if _unnamed(each).name == target), None)

    def variable_of(self, number: int) -> Any:
        """TensorFlow's variable with a number; None for another resource, such as a table."""
        return self.of_handles.get(id(self.variables[number]))

    def step_graph(self, units: UnitCalls, *, is_of_model: Callable[[Any], bool]) -> StepGraph:
        """The graph as plain data."""
        graph = self.function.graph
        operations = _in_order(graph.get_operations())
        numbers = {id(handle): number for number, handle in enumerate(self.variables)}
        described = tuple(self._described(operation, units) for operation in operations)
        tensors = [tensor for operation in operations for tensor in operation.outputs]
        by_name = {operation.name: operation for operation in operations}
        return StepGraph(
            operations=described,
            specs={tensor.name: spec_of(tensor) for tensor in tensors},
            variables={
                name.partition(":")[0]: numbers[id(held)]
                for name, held in self.captures.items()
                if id(held) in numbers
            },
            arguments=tuple(t.name for t in self.function.inputs if t.name not in self.captures),
            outputs=tuple(self.outputs),
            gradients=(gradients := self._gradients(numbers)),
            sums=self._sums(gradients, is_of_model),
            local=frozenset(tensor.name for tensor in tensors if tensor.dtype in _WITHOUT_BYTES),
            line_of=lambda name: _private.line_of(by_name[name]),
        )

    def _described(self, operation: Any, units: UnitCalls) -> Operation:
        note = self.recorder.notes.get(operation.name)
        return Operation(
            name=operation.name,
            kind=operation.type,
            inputs=tuple(tensor.name for tensor in operation.inputs),
            outputs=tuple(tensor.name for tensor in operation.outputs),
            controls=tuple(control.name for control in operation.control_inputs),
            stateful=_private.is_stateful(operation),
            call=None if note is None or note.call is None else units.position(note.call),
            in_gradient=note is not None and note.in_gradient,
        )

    def _gradients(self, numbers: Mapping[int, int]) -> dict[str, int]:
        """The outputs that are gradients of variables, also scaled or clipped."""
        found = {}
        for tensor in self.function.outputs:
            variable = self._variable_behind(tensor)
            if variable is not None and id(variable.handle) in numbers:
                found[tensor.name] = numbers[id(variable.handle)]
        return found

    def _sums(
        self, gradients: Mapping[str, int], is_of_model: Callable[[Any], bool]
    ) -> dict[int, TensorSpec]:
        """The outputs that are whole gradients: one dense tensor in the variable's shape."""
        found: dict[int, TensorSpec] = {}
        position = 0
        for example in tf.nest.flatten(self.function.structured_outputs):
            if example is None:
                continue
            count = len(tf.nest.flatten(example, expand_composites=True))
            tensor = self.function.outputs[position]
            number = gradients.get(tensor.name)
            variable = None if number is None else self.variable_of(number)
            is_whole = count == 1 and variable is not None and tensor.shape.is_compatible_with(variable.shape)
            if is_whole and is_of_model(variable):
                own, dtype = spec_of(variable), tensor.dtype
                found[position] = TensorSpec(own.shape, dtype.name, prod(own.shape) * dtype.size)
            position += count
        return found

    def _variable_behind(self, tensor: Any) -> Any:
        """The variable whose gradient a tensor is, or is made of by scaling: of its shape, from it alone."""
        known = self.recorder.gradients
        for _ in range(_MOST_SCALINGS):
            if tensor.name in known:
                return known[tensor.name]
            operation = tensor.op
            if operation.type == "UnsortedSegmentSum":  # rows of a sparse gradient become a dense one
                tensor = operation.inputs[0]
                continue
            like = [given for given in operation.inputs if given.shape.is_compatible_with(tensor.shape)]
            if len(like) != 1 or operation.type not in _SCALINGS:
                return None
            tensor = like[0]
        return None


# What may stand between a gradient and its return from the step function.
_SCALINGS = frozenset("Identity Mul RealDiv Div DivNoNan Cast ClipByValue CheckNumerics Neg".split())
_MOST_SCALINGS = 16


def trace_step(
    function: Callable[..., Any],
    specs: Sequence[Any],
    *,
    name: str = "step",
    recorder: Recorder | None = None,
) -> Trace:
    """Traces a function of flat tensors."""
    recorder = Recorder() if recorder is None else recorder

    # AutoGraph converts this and what it calls, as under tf.function, so it cannot have a `finally`.
    def run(*tensors: Any) -> Any:
        recorder.begin()
        result = function(*tensors)
        recorder.end()
        return result

    with recorder.installed(), _private.outside_of_functions():
        traced = tf.function(run).get_concrete_function(*specs)
    captures = {internal.name: held for held, internal in traced.graph.captures}
    handles = {id(held): held for held in captures.values() if held.dtype == tf.resource}
    if not traced.outputs:
        raise TraceError(f"{name} returns no tensor, so nothing of it reaches the script. Return the loss.")
    of_handles = {id(variable.handle): variable for variable in traced.graph.variables}
    return Trace(traced, recorder, captures, tuple(handles.values()), of_handles)


def _unnamed(tensor: Any) -> Any:
    """The tensor behind copies under other names, as a function makes them of what it returns."""
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


def spec_of(tensor: Any) -> TensorSpec:
    """Shape, type and bytes; -1 for sizes that are not known."""
    rank = tensor.shape.rank
    shape = (-1,) if rank is None else tuple(-1 if size is None else size for size in tensor.shape.as_list())
    elements = 1
    for size in shape:
        elements *= max(size, 0) if size != -1 else _UNKNOWN_SIZE
    width = 0 if tensor.dtype in _WITHOUT_BYTES else tensor.dtype.size
    return TensorSpec(shape, tensor.dtype.name, elements * width)


# An estimate, for choices between routes; what cannot be sent is refused.
_UNKNOWN_SIZE = 1024


def _in_order(operations: Sequence[Any]) -> list[Any]:
    """Each operation behind those that it needs: gradients of loops add inputs to operations made before."""
    done: set[str] = set()
    ordered = []
    for root in operations:
        pending = [(root, False)]
        while pending:
            operation, ready = pending.pop()
            if operation.name in done:
                continue
            if ready:
                done.add(operation.name)
                ordered.append(operation)
                continue
            pending.append((operation, True))
            before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
            pending += [(other, False) for other in before if other.name not in done]
    return ordered

"""Describes a traced step to the planner: units, the tensors between them, work and bytes.

The planner sees the forward; what a unit saves for its backward is known exactly, for the gradients are in
the same graph.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from shardwright.model_graph import ModelGraph, Node, ParameterSpec, TensorSpec, Unit, Value, Work
from shardwright.tensorflow.step_graph import READS, Operation, StepGraph

# Operations that multiply matrices, as oneDNN and cuBLAS do.
_PRODUCTS = frozenset("MatMul BatchMatMul BatchMatMulV2 BatchMatMulV3 Einsum".split())
_CONVOLUTIONS = frozenset(
    "Conv1D Conv2D Conv3D DepthwiseConv2dNative Conv2DBackpropInput Conv3DBackpropInputV2".split()
)


@dataclass(frozen=True, slots=True)
class ModelVariable:
    """A variable of the model."""

    name: str
    spec: TensorSpec
    trained: bool


def model_graph(
    graph: StepGraph,
    labels: Sequence[str],
    classes: Sequence[str],
    variables: Mapping[int, ModelVariable],
    *,
    parameters: Sequence[ModelVariable],
    batch_size: int,
) -> ModelGraph:
    """The model as the planner reads it."""
    return _Description(graph, labels, classes, variables).model_graph(parameters, batch_size)


class _Description:
    def __init__(
        self,
        graph: StepGraph,
        labels: Sequence[str],
        classes: Sequence[str],
        variables: Mapping[int, ModelVariable],
    ):
        self._graph = graph
        self._labels = labels
        self._classes = classes
        self._variables = variables
        self._free = _free_operations(graph)
        forward = [op for op in graph.operations if not op.in_gradient and op.name not in self._free]
        backward = {op.name for op in graph.operations if op.in_gradient}
        # What rests on gradients is no part of the forward: clipping, scaling, norms.
        makers = graph.makers()
        for operation in graph.operations:
            if any(makers[tensor].name in backward for tensor in operation.inputs):
                backward.add(operation.name)
        forward = [op for op in forward if op.name not in backward and op.name not in graph.variables]
        read_again = graph.weight_reads()
        self._saved = {
            tensor
            for operation in graph.operations
            if operation.name in backward
            for tensor in operation.inputs
            if makers[tensor].name not in backward and makers[tensor].name not in read_again
        }
        self._trains = bool(backward)
        self._groups = _groups(forward)
        self._node_of = {op.name: at for at, group in enumerate(self._groups) for op in group}
        self._maker = makers
        self._holder: dict[int, int] = {}
        for at, group in enumerate(self._groups):
            for operation in group:
                for variable in graph.variables_of(operation):
                    self._holder.setdefault(variable, at)

    def model_graph(self, parameters: Sequence[ModelVariable], batch_size: int) -> ModelGraph:
        values, number = self._values()
        nodes = tuple(self._node(at, number) for at in range(len(self._groups)))
        arguments = [self._graph.specs[name] for name in self._graph.arguments]
        return ModelGraph(
            nodes=nodes,
            values=values,
            units=self._units(nodes),
            parameters={v.name: ParameterSpec(v.name, v.spec, is_buffer=not v.trained) for v in parameters},
            loss=self._loss(values, number) if self._trains else None,
            outputs=tuple(number[name] for name in self._graph.outputs if name in number),
            batch_size=batch_size,
            batch_bytes=sum(spec.num_bytes for spec in arguments),
        )

    def _values(self) -> tuple[tuple[Value, ...], dict[str, int]]:
        """The tensors that one node makes and another reads, or the caller gets."""
        read = {
            tensor
            for at, group in enumerate(self._groups)
            for op in group
            for tensor in op.inputs
            if self._node_of.get(self._maker[tensor].name, at) < at
        }
        read.update(name for name in self._graph.outputs if self._maker[name].name in self._node_of)
        values: list[Value] = []
        number: dict[str, int] = {}
        for at, group in enumerate(self._groups):
            position = 0
            for tensor in (tensor for op in group for tensor in op.outputs):
                if tensor in read:
                    spec = self._graph.specs[tensor]
                    floats = spec.dtype.startswith(("float", "bfloat"))
                    spec = TensorSpec(spec.shape, spec.dtype, spec.num_bytes, requires_grad=floats)
                    number[tensor] = len(values)
                    values.append(Value(producer=at, position=position, spec=spec))
                    position += 1
        return tuple(values), number

    def _node(self, at: int, number: Mapping[str, int]) -> Node:
        group = self._groups[at]
        made = [tensor for op in group for tensor in op.outputs]
        inputs = {
            number[tensor]
            for op in group
            for tensor in op.inputs
            if tensor in number and self._node_of[self._maker[tensor].name] < at
        }
        outputs = [number[tensor] for tensor in made if tensor in number]
        saved = sum(self._graph.specs[tensor].num_bytes for tensor in made if tensor in self._saved)
        work = sum((self._work(op) for op in group), Work())
        call = group[0].call
        label, _, ordinal = ("" if call is None else self._labels[call]).partition("#")
        shared: dict[str, Any] = {
            "inputs": tuple(sorted(inputs)),
            "outputs": tuple(outputs),
            "flops": int(work.product_flops),
            "work": work,
            "saved_bytes": saved,
            "line": self._graph.line_of(group[0].name),
        }
        if call is None:
            held = tuple(dict.fromkeys(self._names(group)))
            return Node("op", group[0].kind, cost_class=f"op {at}", parameters=held, **shared)
        shapes = [self._graph.specs[t].shape for op in group for t in op.outputs]
        cost_class = f"{self._classes[call]} {_hash_of((*shapes, work))}"
        return Node("unit", label, ordinal=int(ordinal or 0), cost_class=cost_class, **shared)

    def _names(self, group: Sequence[Operation]) -> list[str]:
        """Variables that a node is the first to use: it holds them, and others get the values from there."""
        return [
            self._variables[variable].name
            for op in group
            for variable in self._graph.variables_of(op)
            if variable in self._variables and self._holder[variable] == self._node_of[op.name]
        ]

    def _units(self, nodes: Sequence[Node]) -> dict[str, Unit]:
        units: dict[str, Unit] = {}
        for at, node in enumerate(nodes):
            if node.kind != "unit":
                continue
            group = self._groups[at]
            call = group[0].call
            assert call is not None
            changes = any(
                op.kind not in READS and op.stateful and self._graph.variables_of(op) for op in group
            )
            before = units.get(node.name)
            held = tuple(dict.fromkeys((*(before.parameters if before else ()), *self._names(group))))
            units[node.name] = Unit(
                node.name,
                self._classes[call],
                held,
                num_calls=1 + (before.num_calls if before else 0),
                mutates_buffers=changes or (before is not None and before.mutates_buffers),
            )
        return units

    def _loss(self, values: Sequence[Value], number: Mapping[str, int]) -> int | None:
        """The value that gradients most likely start from: the last scalar number of the forward."""
        floats = [at for at, value in enumerate(values) if value.spec.requires_grad]
        scalars = [at for at in floats if values[at].spec.shape == ()]
        return max(scalars, default=max(floats, default=None))

    def _work(self, operation: Operation) -> Work:
        specs = self._graph.specs
        inputs = [specs[tensor] for tensor in operation.inputs]
        outputs = [specs[tensor] for tensor in operation.outputs]
        moved = sum(spec.num_bytes for spec in (*inputs, *outputs))
        flops = _flops(operation.kind, inputs, outputs)
        if flops:
            return Work(products=1, product_flops=flops, product_bytes=moved // 2)
        if operation.kind in READS or operation.kind in _FOR_NOTHING:
            return Work()
        return Work(kernels=1, moved_bytes=moved)


_FOR_NOTHING = frozenset(
    "Const Identity NoOp Placeholder Reshape Shape ExpandDims Squeeze StopGradient".split()
)


def _hash_of(value: Any) -> str:
    """A short name of a value."""
    return hashlib.sha256(repr(value).encode()).hexdigest()[:12]


def _free_operations(graph: StepGraph) -> set[str]:
    """Operations that rest on the batch and on constants alone."""
    free: set[str] = set()
    makers = graph.makers()
    for operation in graph.operations:
        if operation.name in graph.variables or (operation.stateful and operation.kind != "Placeholder"):
            continue
        if all(makers[tensor].name in free for tensor in operation.inputs):
            free.add(operation.name)
    return free


def _groups(forward: Sequence[Operation]) -> list[list[Operation]]:
    """The operations of each unit call together, and each one of the glue by itself."""
    groups: list[list[Operation]] = []
    of_call: dict[int, list[Operation]] = {}
    for operation in forward:
        if operation.call is None:
            groups.append([operation])
        elif operation.call in of_call:
            of_call[operation.call].append(operation)
        else:
            of_call[operation.call] = [operation]
            groups.append(of_call[operation.call])
    return groups


def _flops(kind: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> int:
    """Floating-point operations of a product; 0 for anything else. Unknown sizes count as 1."""
    if not outputs:
        return 0
    made = _elements(outputs[0])
    if kind in _PRODUCTS and len(inputs) == 2:
        # (..., m, k) x (..., k, n): made = batch * m * n, and the two inputs share k and the batch.
        a, b = _elements(inputs[0]), _elements(inputs[1])
        shared = (
            max(1, prod(s for s in outputs[0].shape[:-2] if s > 0)) if kind.startswith("BatchMatMul") else 1
        )
        return int(2 * (a * b * made / shared) ** 0.5)
    if kind in _CONVOLUTIONS and len(inputs) >= 2:
        kernel = inputs[1].shape
        return 2 * made * max(1, prod(s for s in kernel[:-1] if s > 0))
    return 0


def _elements(spec: TensorSpec) -> int:
    return max(1, prod(size for size in spec.shape if size > 0))

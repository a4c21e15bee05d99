"""Describes a traced step to the planner: units, the tensors between them, work, bytes, seconds.

::

    traced step   embedding ─ block 0 ─ block 1 ─ head     as many stages as calls of units
                                 │
                    random ─▶ forward piece ─ saved ─▶ backward piece ◀─ random

A piece is what a rank will run, only smaller. Variables have the values that they have now, and get them
back.

The planner sees the forward; what a unit saves for its backward is known exactly, for the gradients are in
the same graph.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import tensorflow as tf

from shardwright.errors import TraceError
from shardwright.model_graph import ModelGraph, Node, ParameterSpec, TensorSpec, Unit, Value, Work
from shardwright.run.timing import Timing, repetitions
from shardwright.tensorflow.pieces import BuiltPiece, Pieces
from shardwright.tensorflow.placement import place
from shardwright.tensorflow.routes import Part, routes_of
from shardwright.tensorflow.row_gradients import GradientSums
from shardwright.tensorflow.step_graph import READS, Operation, StepGraph
from shardwright.tensorflow.trace import Trace


@dataclass(slots=True)
class TimedStep:
    """A traced step whose units can be timed.

    Attributes:
        graph: the same as the planner reads it.
        lent: gives variables values for a while that have none yet.
    """

    trace: Trace
    step: StepGraph
    graph: ModelGraph
    labels: Sequence[str]
    lent: Callable[[Sequence[Any]], AbstractContextManager[None]]
    _pieces: Pieces | None = field(default=None, repr=False)

    def timing(self, cost_class: str, share_cores: bool) -> Timing:
        """The seconds of one call of the units of a class."""
        with tf.init_scope():  # a tf.function may be under way
            return self._timing(cost_class, share_cores)

    def _timing(self, cost_class: str, share_cores: bool) -> Timing:
        call = self._call_of(cost_class)
        if self._pieces is None:
            self._pieces = self._cut()
        forward = self._pieces.built("forward", call)
        backward = self._pieces.built("backward", call)
        keys: list[tuple[Part, int]] = [("forward", call), ("backward", call)]
        summed = self._pieces.summed(keys)
        now = time.thread_time if share_cores and _runs_in_this_thread() else time.perf_counter
        with self._variables_kept(), self.lent(self._variables_of(keys)):
            self._pieces.sums.begin(summed, self._pieces.specs)
            given = {name: self._random(name) for name in (forward.feeds if forward else ())}
            runs = [self._run_once(forward, backward, given, now) for _ in repetitions()]
            self._pieces.sums.taken(summed, self._pieces.specs)
        timing = Timing.of_runs(runs[1:])  # the first warms up
        # Of a backward with weights, half is taken to be theirs.
        return replace(timing, weight_s=timing.backward_s / 2) if summed else timing

    def _variables_of(self, keys: Iterable[tuple[Part, int]]) -> list[Any]:
        """What these pieces read, as TensorFlow's variables."""
        assert self._pieces is not None
        names = {name for key in keys for name in self._pieces.body(key)}
        numbers = {n for op in self.step.operations if op.name in names for n in self.step.variables_of(op)}
        found = [self.trace.variable_of(number) for number in sorted(numbers)]
        return [variable for variable in found if variable is not None]

    def _call_of(self, cost_class: str) -> int:
        node = next(node for node in self.graph.nodes if node.cost_class == cost_class)
        return self.labels.index(f"{node.name}#{node.ordinal}" if node.ordinal else node.name)

    def _cut(self) -> Pieces:
        count = len(self.labels)
        placement = place(self.step, range(count), num_stages=count)
        routes = routes_of(self.step, placement)
        return Pieces(self.trace, routes.pieces, self.step.sums, GradientSums())

    def _run_once(
        self,
        forward: BuiltPiece | None,
        backward: BuiltPiece | None,
        given: dict[str, Any],
        now: Any,
    ) -> tuple[float, float]:
        """Seconds of the forward and of the backward."""
        forward_s = backward_s = 0.0
        known = dict(given)
        if forward is not None:
            begun_s = now()
            made = forward.run([given[name] for name in forward.feeds])
            forward_s = now() - begun_s
            known.update(zip(forward.gives, made, strict=False))
        if backward is not None:
            for name in backward.feeds:
                if name not in known:
                    given[name] = known[name] = self._random(name)
            tensors = [known[name] for name in backward.feeds]
            begun_s = now()
            backward.run(tensors)
            backward_s = now() - begun_s
        return forward_s, backward_s

    def _random(self, name: str) -> Any:
        """Data in the shape of a tensor, without a draw from TensorFlow's generators."""
        spec: TensorSpec = self.step.specs[name]
        if name in self.step.local or -1 in spec.shape:
            raise TraceError(
                f"a {spec.dtype} tensor of shape {spec.shape} goes into the unit, and nobody can make one up"
            )
        dtype = tf.as_dtype(spec.dtype)
        if dtype.is_floating:
            return tf.cast(tf.random.stateless_normal(spec.shape, seed=[1, 2]), dtype)
        return tf.ones(spec.shape, dtype) if dtype == tf.bool else tf.zeros(spec.shape, dtype)

    @contextmanager
    def _variables_kept(self) -> Iterator[None]:
        """Gives variables that the step writes the values back that they have now."""
        written = [self.trace.variable_of(number) for number in sorted(self.step.written())]
        before = [
            (variable, variable.read_value())
            for variable in written
            if variable is not None and not hasattr(variable, "_shardwright_guard")
        ]
        try:
            yield
        finally:
            for variable, value in before:
                variable.assign(value)


def _runs_in_this_thread() -> bool:
    return int(tf.config.threading.get_intra_op_parallelism_threads()) == 1


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

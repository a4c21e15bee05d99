"""Builds the pieces of a step as concrete functions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import graph_pb2

from shardwright.model_graph import TensorSpec
from shardwright.tensorflow import _private
from shardwright.tensorflow.routes import Part, Piece, has_effect
from shardwright.tensorflow.row_gradients import GradientSums
from shardwright.tensorflow.step_graph import StepGraph
from shardwright.tensorflow.trace import Trace


@dataclass(frozen=True, slots=True)
class BuiltPiece:
    """A piece that can be run.

    Attributes:
        feeds: names of the tensors that it takes, in the order of its arguments.
        run: runs it on the tensors that it takes; gives those that it returns.
    """

    feeds: tuple[str, ...]
    gives: tuple[str, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]


class Pieces:
    """The pieces of a step, each built when it is first asked for."""

    def __init__(
        self,
        trace: Trace,
        pieces: Mapping[tuple[Part, int], Piece],
        specs: Mapping[int, TensorSpec],
        sums: GradientSums,
    ):
        self.sums = sums
        self.specs = specs
        self._trace = trace
        self._pieces = pieces
        self._builder: PieceBuilder | None = None
        self._built: dict[tuple[Part, int], BuiltPiece | None] = {}
        self._whole: BuiltPiece | None = None

    def built(self, part: Part, stage: int) -> BuiltPiece | None:
        """A piece; None where there is nothing to run."""
        key = part, stage
        if key not in self._built:
            if self._builder is None:
                self._builder = PieceBuilder(self._trace, self.specs, self.sums)
            self._built[key] = self._builder.build(self._pieces[key])
        return self._built[key]

    def whole(self, graph: StepGraph, part: Sequence[Any]) -> dict[str, Any]:
        """Runs all of the step, where one rank has the whole model; gives what it returns, by name."""
        if self._whole is None:
            effects = [each.name for each in graph.operations if has_effect(each)]
            body = frozenset(each.name for each in graph.operations)
            gives = tuple(dict.fromkeys(graph.outputs))
            piece = Piece("forward", 0, body, graph.arguments, gives, tuple(effects))
            self._whole = PieceBuilder(self._trace, self.specs, self.sums).build(piece)
        assert self._whole is not None
        return dict(zip(self._whole.gives, self._whole.run(part), strict=False))

    def body(self, key: tuple[Part, int]) -> frozenset[str]:
        """Names of the operations of a piece."""
        return self._pieces[key].body

    def summed(self, keys: Iterable[tuple[Part, int]]) -> list[int]:
        """Positions of the outputs whose sums these pieces add to."""
        return sorted({position for key in keys for _, position in self._pieces[key].sums})


class PieceBuilder:
    """Builds pieces of one trace.

    Operations are copied from the trace's graph, with the control edges between them. So writes and random
    numbers of a piece keep the order of the trace. (Pruning the traced function, as `wrap_function` can,
    would lose it.)
    """

    def __init__(self, trace: Trace, specs: Mapping[int, TensorSpec], sums: GradientSums):
        self._trace = trace
        self._specs = specs
        self._sums = sums
        graph = trace.function.graph
        definition = graph.as_graph_def(add_shapes=False)
        self._nodes = {node.name: node for node in definition.node}
        self._order = {node.name: at for at, node in enumerate(definition.node)}
        self._versions, self._library = definition.versions, definition.library
        self._tensors = {tensor.name: tensor for op in graph.get_operations() for tensor in op.outputs}

    def build(self, piece: Piece) -> BuiltPiece | None:
        """Builds a piece; None where there is nothing to run."""
        if not piece.gives and not piece.effects and not piece.sums:
            return None
        captured = self._captured(piece)
        definition = self._definition(piece, set(captured))
        # Before `wrap_function`, which takes variables that are made inside for its own.
        sums = [(name, self._sums.variable(at, self._specs[at])) for name, at in piece.sums]
        specs = [tf.TensorSpec(self._tensors[n].shape, self._tensors[n].dtype) for n in piece.feeds]
        function = tf.compat.v1.wrap_function(
            lambda *given: self._import(piece, definition, captured, sums, given), specs
        )
        return BuiltPiece(piece.feeds, piece.gives, _private.direct_call(function))

    def _captured(self, piece: Piece) -> list[str]:
        """Names of the placeholders of variables and constants that a piece needs."""
        found = {
            tensor.name
            for name in piece.body
            for tensor in self._tensors_of(name)
            if tensor.name in self._trace.captures
        }
        return sorted(found)

    def _tensors_of(self, name: str) -> Sequence[Any]:
        operation = self._trace.function.graph.get_operation_by_name(name)
        return [*operation.inputs, *operation.outputs]

    def _definition(self, piece: Piece, captured: set[str]) -> Any:
        definition = graph_pb2.GraphDef(versions=self._versions, library=self._library)
        replaced = {name.partition(":")[0] for name in (*captured, *piece.feeds)}
        placeholders = {name for name in replaced if self._nodes[name].op == "Placeholder"}
        for name in sorted(piece.body - placeholders, key=self._order.__getitem__):
            node = definition.node.add()
            node.CopyFrom(self._nodes[name])
            node.attr.pop("_class", None)  # places it beside an operation that may be elsewhere
            kept = [given for given in node.input if _source(given) in piece.body or given[0] != "^"]
            del node.input[:]
            node.input.extend(given for given in kept if not (given[0] == "^" and given[1:] in placeholders))
            node.input.extend(f"^{before}" for before in piece.behind.get(name, ()))
        return definition

    def _import(
        self,
        piece: Piece,
        definition: Any,
        captured: Sequence[str],
        sums: Sequence[tuple[str, Any]],
        given: Sequence[Any],
    ) -> Any:
        graph = tf.compat.v1.get_default_graph()
        replaced = dict(zip(piece.feeds, given, strict=True))
        for name in captured:
            replaced[name] = graph.capture(self._trace.captures[name])
        inside = [name for name in (*piece.gives, *dict(piece.sums)) if name not in replaced]
        inside = list(dict.fromkeys(inside))
        wanted = [*inside, *piece.effects]
        used = {(i if ":" in i else f"{i}:0") for node in definition.node for i in node.input if i[0] != "^"}
        found = tf.graph_util.import_graph_def(
            definition,
            input_map={name: tensor for name, tensor in replaced.items() if name in used},
            return_elements=wanted,
            name="",
        )
        made = {**replaced, **dict(zip(inside, found, strict=False))}
        added = [
            tf.raw_ops.AssignAddVariableOp(resource=graph.capture(variable.handle), value=made[name])
            for name, variable in sums
        ]
        with tf.control_dependencies([*found[len(inside) :], *added]):
            results = [tf.identity(made[name]) for name in piece.gives]
            # A function without results would not be run.
            return results or [tf.zeros([])]


def _source(given: str) -> str:
    """The operation that an input of a node names: ``name:1``, ``name`` or ``^name``."""
    return given.lstrip("^").partition(":")[0]

"""Notes in a trace which layer makes each operation, and which gradients are asked for."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from shardwright.tensorflow import _private
from shardwright.tensorflow.variables import tf_variable

_ASK_NO_VALUE = frozenset(("VariableShape", "VarIsInitializedOp"))


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One call of a layer.

    Attributes:
        number: of the call among all calls of layers.
        around: the call that it was made in; None for one of the outermost.
    """

    layer: Any = field(compare=False)
    number: int
    around: "LayerCall | None" = None

    def chain(self) -> list["LayerCall"]:
        """The calls around it and itself, the outermost first."""
        return [*(self.around.chain() if self.around else ()), self]


@dataclass(frozen=True, slots=True)
class Note:
    """What is noted of one operation.

    Attributes:
        call: innermost call of a layer that made it; None for code between layers.
        in_gradient: it was made while gradients were asked for.
    """

    call: LayerCall | None
    in_gradient: bool


class _AllMade(Exception):  # noqa: N818
    """Ends a trace that has made what it was for."""


class Recorder:
    """Records one trace.

    Attributes:
        sizes: name of each of these tensors that was made -> number of entries; None where that is not known.
        hidden: layers that were called in a graph inside this one, where they cannot have stages.
        gradients: name of a tensor -> TensorFlow's variable whose gradient it is.
        target: the tensor whose gradients were asked for last; None before, and where they are several.
        losses: all tensors whose gradients by variables were asked for; without gradients, what the model has
            told as its loss.
        goes_on: where the step goes on with a variable after an optimizer was given its gradient.
    """

    def __init__(self, *, until: Collection[str] | None = None) -> None:
        self._graph: Any = None
        self._until = until
        self._clear()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Watches TensorFlow and Keras; only what happens inside of `recording` is noted."""
        with (
            _private.operations_told(self._note_operation),
            _private.gradients_told(self._begin_gradient, self._end_gradient),
            _private.layers_told(self._begin_call, self._end_call),
            _private.functions_inlined(),
        ):
            yield

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def begin(self) -> None:
        """Notes what the current graph gets; TensorFlow traces a function anew that has made variables."""
        self._clear()
        self._graph = tf.compat.v1.get_default_graph()
        for argument in self._graph.get_operations():
            self._note_sizes(argument)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def end(self) -> None:
        """Notes nothing any more."""
        self._graph = None

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def given(self, pairs: Iterable[tuple[Any, Any]], *, waits: bool) -> None:
        """Notes what an optimizer was given: gradients, and variables that may not be used any more.

        Gradients that wait are applied when the batch has ended. So the step function would go on with values
        from before the update, as those do not that update the discriminator of a GAN first; and the update
        would change what the step assigns, such as clipped weights.
        """
        for gradient, variable in pairs:
            own = tf_variable(variable)
            for tensor in tf.nest.flatten(gradient, expand_composites=True):
                if tensor is not None:  # whatever a step has made of it
                    self.gradients[tensor.name] = own
            if waits:
                name = getattr(variable, "path", None) or own.name
                self._waiting[self._graph.capture(own.handle).name] = name

    @contextmanager
    def updating(self) -> Iterator[None]:
        """While it lasts, operations are those of an update, and not what a step makes of gradients."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _clear(self) -> None:
        self.goes_on: str | None = None
        self._waiting: dict[str, str] = {}
        self.sizes: dict[str, int | None] = {}
        self.notes: dict[str, Note] = {}
        self.calls: list[LayerCall] = []
        self.gradients: dict[str, Any] = {}
        self.hidden: list[Any] = []
        self.target: Any = None
        self.losses: list[Any] = []
        self.trains = False
        self._asked: list[Any] = []
        self._call: LayerCall | None = None
        self._depth = 0

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def told(self, loss: Any) -> None:
        """Notes what a model says is its loss, where no gradients are asked for."""
        if not self.trains:
            self.losses = [each for each in [loss] if getattr(each, "graph", None) is self._graph]

    def _note_losses(self, asked: Iterable[Any]) -> None:
        if not self.trains:
            self.trains, self.losses = True, []
        self.losses += [each for each in asked if getattr(each, "graph", None) is self._graph]

    def _note_operation(self, graph: Any, operation: Any) -> None:
        if graph is self._graph:
            # Branches and loops take a variable as it is, and read it inside.
            if self._waiting and operation.type not in _ASK_NO_VALUE:
                self._note_old_value(operation)
            self.notes[operation.name] = Note(self._call, self._depth > 0)
            self._note_sizes(operation)

    def _note_sizes(self, operation: Any) -> None:
        if self._until is None:
            return
        for tensor in operation.outputs:
            if tensor.name in self._until:
                self.sizes[tensor.name] = tensor.shape.num_elements()
        if len(self.sizes) == len(self._until):
            raise _AllMade

    def _note_old_value(self, operation: Any) -> None:
        for tensor in operation.inputs:
            if tensor.name in self._waiting and self.goes_on is None:
                line, name = _private.line_of(operation), self._waiting[tensor.name]
                self.goes_on = f"{line}: the step uses {name} after an optimizer was given its gradient."

    def _begin_call(self, layer: Any) -> bool:
        if self._graph is None:
            return False
        if self._graph is not tf.compat.v1.get_default_graph():
            if self._call is None:
                self.hidden.append(layer)
            return False
        self._call = LayerCall(layer, len(self.calls), self._call)
        self.calls.append(self._call)
        return True

    def _end_call(self) -> None:
        assert self._call is not None
        self._call = self._call.around

    def _begin_gradient(self, target: Any) -> None:
        if self._depth == 0 and self._graph is not None:
            self._asked = flat = tf.nest.flatten(target)
            is_one = len(flat) == 1 and getattr(flat[0], "graph", None) is self._graph
            self.target = flat[0] if is_one else None
        self._depth += 1

    def _end_gradient(self, gradients: Any, sources: Any) -> None:
        self._depth -= 1
        if self._graph is None or gradients is None:
            return
        flat = zip(_leaves(gradients), _leaves(sources), strict=False)
        for gradient, source in flat:
            variable = tf_variable(source)
            if gradient is None or not isinstance(variable, tf.Variable):
                continue
            if self._depth == 0:
                self._note_losses(self._asked)
                self._asked = []
            for tensor in tf.nest.flatten(gradient, expand_composites=True):
                self.gradients[tensor.name] = variable


def _leaves(structure: Any) -> Sequence[Any]:
    leaves: Sequence[Any] = tf.nest.flatten(structure)
    return leaves

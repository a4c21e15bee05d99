"""How a loss rests on the samples of a batch, and what it is divided by.

One rule for all losses of ``fit``: the number and sizes of microbatches never change the training. Sums add
up. Means count by their samples. Where a loss is divided by what the data tell (the weights of samples, the
places that a mask leaves), it is divided by the total of the batch, which is known before the step. All else
is refused.

What a loss is, is found out on random numbers, in the operations behind the rows that layers make::

    trace of  s samples    layers ─▶ rows ─▶ loss    f(a), f(b)
    trace of 2s samples    layers ─▶ rows ─▶ loss    f(a b) = their mean? their sum?

The halves have different numbers in them, and different masks, so that a mean of means tells itself.

::

    microbatch 0   sum of weights 20 ─┐              ┌─ 21 / 2 ─▶ its loss
    microbatch 1   sum of weights  1 ─┴─ total 21 ───┴─ 21 / 2 ─▶ its loss
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from shardwright.errors import TraceError
from shardwright.tensorflow import _private
from shardwright.tensorflow.pieces import PieceBuilder
from shardwright.tensorflow.routes import Piece
from shardwright.tensorflow.row_gradients import GradientSums
from shardwright.tensorflow.step_graph import READS, Operation, StepGraph
from shardwright.tensorflow.trace import Trace

Kind = Literal["mean", "sum", "neither", "unknown"]

_Array = np.ndarray[Any, Any]
_Halves = Callable[[_Array, int], list[_Array]]

_DIVISIONS = {"RealDiv": 1, "DivNoNan": 1, "Div": 1, "Reciprocal": 0}
_HALF = ("float16", "bfloat16")
_DRAWS = 3


@dataclass(frozen=True, slots=True)
class LossReduction:
    """How the losses of a step function rest on the samples of a batch.

    Attributes:
        divisors: tensors that the data tell and losses are divided by -> how they rest on the samples.
        line: of the script, where the kind is neither or unknown.
    """

    kind: Kind
    divisors: Mapping[str, Kind] = field(default_factory=dict)
    line: str = ""


class _UnknownError(Exception):
    """A loss cannot be computed on random numbers."""


def loss_reduction(graph: StepGraph, trace: Trace, twice: Trace, losses: Sequence[Any]) -> LossReduction:
    """How the losses of a step function rest on the samples."""
    divisors: dict[str, Kind] = {}
    kinds: set[Kind] = set()
    for loss in losses:
        try:
            kind, more = _Head(graph, trace, twice, loss.name).reduction()
        except Exception:  # whatever an operation has against these numbers
            kind, more = "unknown", {}
        if kind in ("neither", "unknown"):
            return LossReduction(kind, line=_private.line_of(loss.op))
        kinds.add(kind)
        divisors.update(more)
    if len(kinds) > 1:
        return LossReduction("neither", line=_private.line_of(losses[-1].op))
    return LossReduction(next(iter(kinds), "mean"), divisors)


def piece_of(trace: Trace, body: set[str], feeds: Sequence[str], gives: Sequence[str]) -> Any:
    """A function of some tensors of a trace that gives others."""
    piece = Piece("forward", 0, frozenset(body), tuple(feeds), tuple(gives), ())
    return PieceBuilder(trace, {}, GradientSums()).build(piece)


class _Head:
    """The operations of a step behind the rows that layers make, up to a loss."""

    def __init__(self, graph: StepGraph, trace: Trace, twice: Trace, loss: str):
        self._graph = graph
        self._makers = graph.makers()
        self._traces = trace, twice
        self._shapes = [_shapes(each) for each in self._traces]
        self._loss = loss
        self._of_data = _of_data(graph)
        self._body: set[str] = set()
        self._feeds: set[str] = set()
        self._walk(loss)
        self._divisors = self._found_divisors()

    def reduction(self) -> tuple[Kind, Mapping[str, Kind]]:
        kind = self._kind_of_loss({})
        if kind != "neither" or not self._divisors:
            return kind, {}
        kinds = {name: self._kind_of(name, {}) for name in self._divisors}
        known = {name: each for name, each in kinds.items() if each in ("mean", "sum")}
        return self._kind_of_loss(known), known

    # ---- its operations ----

    def _walk(self, loss: str) -> None:
        pending = [loss]
        while pending:
            tensor = pending.pop()
            operation = self._makers[tensor]
            if tensor in self._feeds or operation.name in self._body:
                continue
            if self._is_given(tensor, operation):
                self._feeds.add(tensor)
            else:
                self._body.add(operation.name)
                pending += operation.inputs

    def _is_given(self, tensor: str, operation: Operation) -> bool:
        if tensor in self._graph.arguments or operation.stateful or operation.kind in READS:
            return True
        if operation.kind.startswith("StatelessRandom"):  # of twice as many it draws other numbers
            return True
        of_layer = operation.call is not None and tensor not in self._of_data
        return of_layer and tensor not in self._graph.local and self._axis(tensor) is not None

    def _found_divisors(self) -> list[str]:
        found: dict[str, None] = {}
        for operation in self._graph.operations:
            if operation.name in self._body and operation.kind in _DIVISIONS:
                tensor = operation.inputs[_DIVISIONS[operation.kind]]
                if self._of_data.get(tensor) and self._axis(tensor) is None:
                    found[tensor] = None
        return list(found)

    def _axis(self, tensor: str) -> int | None:
        """The axis of the samples."""
        small, large = (shapes.get(tensor) for shapes in self._shapes)
        if small is None or large is None or len(small) != len(large):
            raise _UnknownError(tensor)
        return next((axis for axis, (a, b) in enumerate(zip(small, large, strict=True)) if a != b), None)

    # ---- on numbers ----

    def _kind_of_loss(self, divisors: Mapping[str, Kind]) -> Kind:
        return self._kind_of(self._loss, divisors)

    def _kind_of(self, tensor: str, divisors: Mapping[str, Kind]) -> Kind:
        kind = self._kind_in(tensor, divisors, _halves)
        if kind != "neither":
            return kind
        # What a step puts behind one another (real pictures and fake ones) has a part of each.
        return self._kind_in(tensor, divisors, self._halves_of_blocks)

    def _kind_in(
        self,
        tensor: str,
        divisors: Mapping[str, Kind],
        halves_of: _Halves,
    ) -> Kind:
        # As for the divisors, the microbatches' are those of the batch, by their share of it.
        names = sorted(divisors)
        feeds = sorted(self._feeds)
        whole = piece_of(self._traces[1], self._body, feeds, [tensor, *names])
        part = piece_of(self._traces[0], self._body, [*feeds, *names], [tensor])
        specs = self._graph.specs
        is_half = any(specs[t].dtype in _HALF for name in self._body for t in self._outputs(name))
        tolerance = 2e-2 if is_half else 1e-4
        found: set[Kind] = {"mean", "sum"}
        finite = False
        for draw in range(_DRAWS):
            given, halves = self._draw(feeds, np.random.default_rng(draw), halves_of)
            made = dict(zip(whole.gives, whole.run(given), strict=False))
            shares = [made[name] / 2 if divisors[name] == "sum" else made[name] for name in names]
            a, b = (_number(part.run([*half, *shares])[0]) for half in halves)
            both = _number(made[tensor])
            if not np.isfinite([a, b, both]).all():
                continue
            finite = True
            size = tolerance * (abs(a) + abs(b))
            found -= {"mean"} if abs(both - (a + b) / 2) > size / 2 else set()
            found -= {"sum"} if abs(both - (a + b)) > size else set()
        if not finite:
            raise _UnknownError(tensor)
        return "mean" if "mean" in found else "sum" if found else "neither"

    def _outputs(self, name: str) -> list[str]:
        operation = self._traces[0].function.graph.get_operation_by_name(name)
        return [tensor.name for tensor in operation.outputs]

    def _halves_of_blocks(self, value: _Array, axis: int) -> list[_Array]:
        """Of each block that has as many rows as the batch has samples, its first and its last."""
        large = self._shapes[1]
        sizes = (large[name][at] for name in self._graph.arguments if (at := self._axis(name)) is not None)
        samples = next(sizes, None)
        if not samples or value.shape[axis] % samples:
            return _halves(value, axis)
        blocks = [_halves(block, axis) for block in np.split(value, value.shape[axis] // samples, axis)]
        return [np.concatenate(each, axis) for each in zip(*blocks, strict=True)]

    def _draw(
        self,
        feeds: Sequence[str],
        random: np.random.Generator,
        halves_of: _Halves,
    ) -> tuple[list[Any], list[list[Any]]]:
        """Values for a batch, and for its halves."""
        given: list[Any] = []
        halves: list[list[Any]] = [[], []]
        for name in feeds:
            axis, shape = self._axis(name), self._shapes[1][name]
            sizes = [size for size in shape if size is not None]
            if len(sizes) < len(shape):
                raise _UnknownError(name)
            value = _random(sizes, self._graph.specs[name].dtype, axis, random)
            given.append(tf.constant(value))
            parts = [value, value] if axis is None else halves_of(value, axis)
            for half, each in zip(halves, parts, strict=True):
                half.append(tf.constant(each))
        return given, halves


def _random(shape: Sequence[int], dtype: str, axis: int | None, random: np.random.Generator) -> Any:
    """Numbers of which logarithms, roots and lookups exist; each row has its own share of large ones."""
    rows = [1] * len(shape)
    if axis is not None:
        rows[axis] = shape[axis]
    level = random.uniform(0.2, 1.0, rows)
    kind = tf.as_dtype(dtype)
    numbers = random.random(shape, dtype=np.float32)
    if kind.is_floating:
        return ((0.1 + 0.8 * numbers) * level.astype(np.float32)).astype(kind.as_numpy_dtype)
    if kind.is_integer or kind.is_bool:
        return (numbers < level).astype(kind.as_numpy_dtype)
    raise _UnknownError(dtype)


def _halves(value: _Array, axis: int) -> list[_Array]:
    return list(np.split(value, 2, axis))


def _number(tensor: Any) -> float:
    """A loss; of one with a row for each sample, a tape takes the gradient of the sum."""
    return float(np.asarray(tensor, dtype=np.float64).sum())


def _shapes(trace: Trace) -> dict[str, tuple[int | None, ...]]:
    return {
        tensor.name: tuple(tensor.shape.as_list())
        for operation in trace.function.graph.get_operations()
        for tensor in operation.outputs
        if tensor.shape.rank is not None
    }


def _of_data(graph: StepGraph) -> dict[str, bool]:
    """The tensors that rest on the batch and on constants alone -> whether they do on the batch."""
    found: dict[str, bool] = dict.fromkeys(graph.arguments, True)
    for operation in graph.operations:
        known = [found.get(tensor) for tensor in operation.inputs]
        is_plain = not operation.stateful and not operation.kind.startswith("StatelessRandom")
        if is_plain and operation.name not in graph.variables and None not in known:
            found.update((tensor, any(known)) for tensor in operation.outputs if tensor not in found)
    return found


class Divisors:
    """The divisors of a microbatch, computed from its arguments alone."""

    def __init__(self, graph: StepGraph, trace: Trace, kinds: Mapping[str, Kind]):
        self.kinds = kinds
        self._arguments = graph.arguments[: len(graph.arguments) - len(kinds)]
        makers = graph.makers()
        if missing := kinds.keys() - makers.keys():
            raise TraceError(
                f"the step divides a loss by {sorted(missing)[0]}, which it does not make for a batch of "
                "this shape, so microbatches cannot be weighed alike. Set microbatches to 1."
            )
        body: set[str] = set()
        feeds: set[str] = set()
        pending = list(kinds)
        while pending:
            tensor = pending.pop()
            if tensor in self._arguments:
                feeds.add(tensor)
            elif makers[tensor].name not in body:
                body.add(makers[tensor].name)
                pending += makers[tensor].inputs
        self._piece = piece_of(trace, body, sorted(feeds), list(kinds))

    def of(self, part: Sequence[Any]) -> list[Any]:
        """The divisors of a microbatch by itself."""
        given = dict(zip(self._arguments, part, strict=True))
        made = self._piece.run([given[name] for name in self._piece.feeds])
        return [each.numpy() for each in made[: len(self.kinds)]]


def with_shares(
    each: Sequence[Divisors],
    parts: Sequence[Sequence[Any]],
    sizes: Sequence[int],
    total_of: Callable[[Sequence[float]], Sequence[float]],
) -> list[list[Any]]:
    """The arguments of microbatches, and behind them their shares of the divisors of the batch."""
    found = [divisors.of(part) for divisors, part in zip(each, parts, strict=True)]
    kinds = list(each[0].kinds.values())
    sums = [
        sum(
            one[at] * np.float64(1 if kind == "sum" else size) for one, size in zip(found, sizes, strict=True)
        )
        for at, kind in enumerate(kinds)
    ]
    flat = total_of([float(sum(sizes)), *np.concatenate([np.ravel(total) for total in sums])])
    samples, totals = flat[0], np.split(np.array(flat[1:]), np.cumsum([np.size(t) for t in sums])[:-1])
    made = []
    for part, size in zip(parts, sizes, strict=True):
        shares = [
            tf.constant((total * (size if kind == "sum" else 1) / samples).reshape(like.shape), like.dtype)
            for total, kind, like in zip(totals, kinds, found[0], strict=True)
        ]
        made.append([*part, *shares])
    return made

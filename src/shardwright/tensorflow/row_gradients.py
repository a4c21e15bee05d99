"""Gradients of a variable from several microbatches, stages and lookups, and how they come together.

::

    stage 0   gradient of the lookup ─┐
                                      ├─ AddN ─▶ returned
    stage 1   gradient of the head  ──┘

Each stage sums its own part over the microbatches, and one message a batch brings the sums together.
Otherwise a gradient as large as the embedding would go to the first stage in each microbatch.

::

    microbatch 0   backward piece ─▶ += ┐
    microbatch 1   backward piece ─▶ += ┼─ one tensor a gradient ─▶ the caller
    microbatch 2   backward piece ─▶ += ┘

So a gradient is no result of a call, for which room would be made each time, and no operation of its own adds
it up.

The optimizer gets the rows that one process has: Adam of Keras 3 squares each row for itself, and clipping
takes the norm of the rows as they are. Where each sample looks up its own, as token embeddings have it, the
rows of all microbatches stand behind each other. Where rows follow from no sample, as those of positions, one
process has them once, and the microbatches' are added up, row by row. A table with both has them apart::

                  tokens of samples 0 .. 7        positions(tf.range(length))
    one process   [ rows of samples 0 .. 7 ]      [ rows ]
    microbatches  [ 0, 1 ] [ 2, 3 ] [ 4, 5 ] ..   [ rows ] + [ rows ] + [ rows ] ..

Equal rows of two microbatches tell no difference: token types that are all zero are the samples' own. The
number of rows does: a trace with the whole batch has as many rows of positions, and more of token types. That
trace ends when all indices are made, which a model mostly begins with.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from shardwright.model_graph import TensorSpec
from shardwright.tensorflow.recorder import Recorder
from shardwright.tensorflow.step_graph import Operation, StepGraph
from shardwright.tensorflow.trace import Trace

_ADDITIONS = frozenset(("AddN", "AddV2", "Add"))


@dataclass(frozen=True, slots=True)
class Addends:
    """Gradients that are sums of what different stages make.

    Attributes:
        parts: output of the step -> the tensors whose sum it is.
        left_out: names of the operations that would have added them up, which no stage runs.
    """

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def taken_apart(graph: StepGraph, stages: Mapping[str, int], owners: Mapping[int, int]) -> Addends:
    """The gradients that other stages than the variable's have a part in."""
    return _Search(graph, stages, owners).found()


class _Search:
    def __init__(self, graph: StepGraph, stages: Mapping[str, int], owners: Mapping[int, int]):
        self._graph = graph
        self._stages = stages
        self._owners = owners
        self._makers = graph.makers()
        self._reads = Counter(tensor for operation in graph.operations for tensor in operation.inputs)
        self._reads.update(graph.outputs)
        self._waited_for = {name for operation in graph.operations for name in operation.controls}

    def found(self) -> Addends:
        parts: dict[str, tuple[str, ...]] = {}
        left_out: set[str] = set()
        for position in sorted(self._graph.sums):
            name = self._graph.outputs[position]
            additions, leaves = self._sum_behind(name)
            makers = {self._makers[leaf].name for leaf in leaves}
            if len(leaves) < 2 or not makers <= self._stages.keys():
                continue
            owner = self._owners.get(self._graph.gradients[name])
            if any(self._stages[maker] != owner for maker in makers):
                parts[name] = tuple(leaves)
                left_out |= additions
        return Addends(parts, frozenset(left_out))

    def _sum_behind(self, output: str) -> tuple[set[str], list[str]]:
        """The operations that do nothing but add up for this output, and what they add."""
        additions: set[str] = set()
        leaves: list[str] = []
        pending = [output]
        while pending:
            tensor = pending.pop()
            operation = self._makers[tensor]
            if self._reads[tensor] == 1 and self._only_adds(operation):
                additions.add(operation.name)
                pending.extend(reversed(operation.inputs))
            else:
                leaves.append(tensor)
        return additions, leaves

    def _only_adds(self, operation: Operation) -> bool:
        if operation.name in self._waited_for or operation.name not in self._stages:
            return False
        if operation.kind == "Identity":
            return True
        specs = self._graph.specs
        shapes = {specs[tensor].shape for tensor in (*operation.inputs, *operation.outputs)}
        return operation.kind in _ADDITIONS and len(shapes) == 1


_Key = tuple[int, TensorSpec]


class GradientSums:
    """The sums of a rank; batches come one after the other, so all step functions share them."""

    def __init__(self) -> None:
        self._variables: dict[_Key, Any] = {}
        self._calls: dict[tuple[_Key, ...], tuple[Any, Any]] = {}

    def variable(self, position: int, spec: TensorSpec) -> Any:
        """The variable with the sum of an output; it has a value between `begin` and `taken`."""
        key = position, spec
        if key not in self._variables:
            with tf.init_scope():
                self._variables[key] = tf.Variable(
                    tf.zeros([0], spec.dtype), shape=tf.TensorShape(None), trainable=False, name="sum"
                )
        return self._variables[key]

    def begin(self, positions: Sequence[int], specs: Mapping[int, TensorSpec]) -> None:
        """Sets these sums to zero."""
        if positions:
            self._calls_of(positions, specs)[0]()

    def taken(self, positions: Sequence[int], specs: Mapping[int, TensorSpec]) -> dict[int, Any]:
        """The sums, by position; they hold no memory here any more."""
        if not positions:
            return {}
        return dict(zip(positions, self._calls_of(positions, specs)[1](), strict=True))

    def _calls_of(self, positions: Sequence[int], specs: Mapping[int, TensorSpec]) -> tuple[Any, Any]:
        keys = tuple((position, specs[position]) for position in positions)
        if keys not in self._calls:
            with tf.init_scope():
                self._calls[keys] = self._traced(keys)
        return self._calls[keys]

    def _traced(self, keys: Sequence[_Key]) -> tuple[Any, Any]:
        variables = [self.variable(*key) for key in keys]

        def begin() -> Any:
            for variable, (_, spec) in zip(variables, keys, strict=True):
                variable.assign(tf.zeros(spec.shape, spec.dtype))
            return tf.constant(0)

        def take() -> list[Any]:
            found = []
            for variable, (_, spec) in zip(variables, keys, strict=True):
                found.append(tf.ensure_shape(variable.read_value(), spec.shape))
                variable.assign(tf.zeros([0], spec.dtype))
            return found

        made = [tf.function(each, autograph=False).get_concrete_function() for each in (begin, take)]
        return made[0], made[1]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a gradient that stand together: of one lookup, or of several that samples have.

    Attributes:
        count: of them, in the microbatch that was traced.
        are_fixed: they follow from no sample: the whole batch has as many.
    """

    count: int
    are_fixed: bool


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def dense(value: Any) -> Any:
    """A gradient as a dense tensor; all else as it is."""
    return tf.convert_to_tensor(value) if isinstance(value, tf.IndexedSlices) else value


@tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
def scaled(gradient: Any, factor: float | None) -> Any:
    """A gradient, dense or not, times a number; as it is without one."""
    if gradient is None or factor is None:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def rows_of(
    trace: Trace, whole: Callable[[Recorder], Any], *, samples: tuple[int, int] | None = None
) -> dict[int, tuple[Rows, ...]]:
    """The outputs, by their number, that have rows of which the whole batch has as many as a microbatch."""
    outputs = tf.nest.flatten(trace.function.structured_outputs)
    indices = {
        at: _behind_each_other(output.indices)
        for at, output in enumerate(outputs)
        if isinstance(output, tf.IndexedSlices)
    }
    # What the trace takes in from outside is alike for every batch.
    names = {each.name for parts in indices.values() for each in parts if each.name not in trace.captures}
    try:
        of_batch = _sizes(names, whole) if names else {}
    except Exception as error:  # whatever it is: the model may be written for microbatches alone
        _warn("cannot be compared to that of the whole batch, for which the step function fails", error)
        return {}
    if missing := names - of_batch.keys():
        _warn("cannot be compared to that of the whole batch", f"which has no {sorted(missing)[0]}")
        return {}
    found = {}
    for at, parts in indices.items():
        counts = [(each.shape.num_elements(), each) for each in parts]
        pairs = [(n, n if each.name in trace.captures else of_batch[each.name]) for n, each in counts]
        if rows := _kinds(pairs, samples):
            found[at] = rows
    return found


def rows_together(parts: Sequence[Any], *, scale: float, rows: Sequence[Rows] = ()) -> Any:
    """The rows of all microbatches, times a number."""
    if rows and len(parts) > 1:
        columns = zip(*(_apart(part, rows) for part in parts), strict=True)
        made = [_added(column) if of.are_fixed else column for of, column in zip(rows, columns, strict=True)]
        pairs = [pair for column in made for pair in column]
    else:
        pairs = [(part.values, part.indices) for part in parts]
    values, indices = _behind(pairs)
    return tf.IndexedSlices(values * tf.cast(scale, values.dtype), indices, parts[0].dense_shape)


def _behind(pairs: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """(values, indices) behind each other."""
    return tf.concat([values for values, _ in pairs], 0), tf.concat([indices for _, indices in pairs], 0)


def _added(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """(values, indices) of all microbatches added up, if they have the same indices."""
    first = pairs[0][1]
    same = tf.reduce_all(tf.equal(tf.stack([indices for _, indices in pairs[1:]]), first))
    return [tf.cond(same, lambda: (tf.add_n([v for v, _ in pairs]), first), lambda: _behind(pairs))]


def _apart(part: Any, rows: Sequence[Rows]) -> list[tuple[Any, Any]]:
    """(values, indices) of each kind of rows; microbatches may have other numbers of samples."""
    total = part.indices.shape[0]
    total = tf.shape(part.indices)[0] if total is None else total
    fixed = sum(each.count for each in rows if each.are_fixed)
    of_samples = sum(each.count for each in rows if not each.are_fixed)
    sizes = [each.count if each.are_fixed else each.count * (total - fixed) // of_samples for each in rows]
    return list(zip(tf.split(part.values, sizes), tf.split(part.indices, sizes), strict=True))


def _sizes(names: Collection[str], traces: Callable[[Recorder], Any]) -> dict[str, int | None]:
    """How many entries tensors have in a trace, by name, which ends when it has them all."""
    recorder = Recorder(until=names)
    try:
        traces(recorder)
    except Exception:  # what becomes of the recorder's own on its way through Keras and AutoGraph
        if len(recorder.sizes) < len(names):
            raise
    return recorder.sizes


def _behind_each_other(indices: Any) -> list[Any]:
    """The tensors that indices are made of, one behind the other: a table looked up twice has two."""
    made_by = indices.op
    if made_by.type == "ConcatV2" and indices.shape.rank == 1:
        return [part for each in made_by.inputs[:-1] for part in _behind_each_other(each)]
    if made_by.type in ("Identity", "Reshape", "Cast"):
        return _behind_each_other(made_by.inputs[0])
    return [indices]


def _kinds(
    counts: Sequence[tuple[int | None, int | None]], samples: tuple[int, int] | None
) -> tuple[Rows, ...]:
    """The rows of a gradient; empty where none are fixed, or where that cannot be told."""
    found: list[Rows] = []
    for count, others in counts:
        if count is None:
            return ()
        are_fixed = count == others
        if not are_fixed and others is not None and samples is not None:
            few, many = samples
            if count * many != others * few:
                _warn(
                    f"has {count} rows for {few} samples and {others} for {many}",
                    "some are the samples', others are not: give these a table of their own",
                )
                return ()
        if found and not are_fixed and not found[-1].are_fixed:
            count += found.pop().count
        found.append(Rows(count, are_fixed))
    return tuple(found) if any(each.are_fixed for each in found) else ()


def _warn(fact: str, remedy: object) -> None:
    warnings.warn(
        f"the gradient of a lookup {fact} ({remedy}). Its rows come once for each microbatch, so Adam of "
        "Keras 3 and clipping, which take each row for itself, may train otherwise than in one process. With "
        "microbatches set to 1 they do not.",
        stacklevel=3,
    )

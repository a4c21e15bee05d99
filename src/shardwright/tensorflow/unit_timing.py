"""Times the units of a traced step, each cut out as if it had a stage of its own.

::

    traced step   embedding ─ block 0 ─ block 1 ─ head     as many stages as calls of units
                                 │
                    random ─▶ forward piece ─ saved ─▶ backward piece ◀─ random

A piece is what a rank will run, only smaller. Variables have the values that they have now, and get them
back.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import tensorflow as tf

from shardwright.errors import TraceError
from shardwright.model_graph import ModelGraph, TensorSpec
from shardwright.run.timing import Timing, repetitions
from shardwright.tensorflow.gradient_sums import GradientSums
from shardwright.tensorflow.pieces import BuiltPiece, Pieces
from shardwright.tensorflow.placement import place
from shardwright.tensorflow.routes import Part, routes_of
from shardwright.tensorflow.step_graph import StepGraph
from shardwright.tensorflow.trace import Trace


@dataclass(slots=True)
class TimedStep:
    """A traced step whose units can be timed.

    Attributes:
        step: the same as plain data.
        graph: the same as the planner reads it.
        labels: of the unit calls, in order.
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

"""Runs step functions over the stages of a replica."""

import time
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import tensorflow as tf

from shardwright.errors import UsageError
from shardwright.planner import stage_costs_of
from shardwright.run.context import Context
from shardwright.run.joint_calls import call_together, first_cause_named
from shardwright.run.memory import OwnCores, keep_freed_memory
from shardwright.runtime.action_loop import MeasuredRow
from shardwright.runtime.batch_schedules import BatchSchedules
from shardwright.runtime.step_function import microbatch_sizes
from shardwright.schedule import Schedule
from shardwright.tensorflow.batch import Arguments
from shardwright.tensorflow.exchange import Agreement, exchange_results, share_variables
from shardwright.tensorflow.executor import Executor, Results, positions_of
from shardwright.tensorflow.loss_reduction import Divisors, Kind, LossReduction, loss_reduction, with_shares
from shardwright.tensorflow.outputs import Changed, Outputs, Prepared
from shardwright.tensorflow.planning import Planning
from shardwright.tensorflow.program import Program
from shardwright.tensorflow.recorder import Recorder
from shardwright.tensorflow.replicas import Replicas, StepEnd
from shardwright.tensorflow.row_gradients import GradientSums, Rows, dense, rows_of
from shardwright.tensorflow.trace import Trace, trace_step
from shardwright.tensorflow.variables import Variables, tf_variable

# Of a tensor, up to which what a loss is to its samples is tried with microbatches of their own size.
_MOST_BYTES = 128 << 20


class Engine:
    """Runs step functions.

    Attributes:
        recorder: notes of that trace; None where none is going on.
        after_placement: called when the first step has placed the layers, and before it runs them.
        goes_on: where a step that was traced goes on with a variable whose update waits.
    """

    def __init__(self, context: Context, model: Any, variables: Variables, replicas: Replicas | None = None):
        self.is_tracing = False
        self.recorder: Recorder | None = None
        self.goes_on: str | None = None
        self.after_placement: list[Callable[[], Any]] = []
        self._context = context
        self._model = model
        self._replicas = replicas
        self._variables = variables
        self._planning = Planning(context, model, GradientSums(), self._lent)
        self._agreement = Agreement(context)
        self._functions: dict[int, Callable[..., Any]] = {}
        self._traces: dict[tuple[Hashable, ...], Trace] = {}
        self._prepared: dict[tuple[Hashable, ...], Prepared] = {}
        self._divisors: dict[int, Mapping[str, Kind]] = {}
        self._schedules: BatchSchedules | None = None
        self._executor: Executor | None = None
        self._failure = ""
        self._cores = OwnCores(context)
        self._step_end = StepEnd(context)
        if context.device.type == "cpu":
            keep_freed_memory()

    def prepare(self, function: Callable[..., Any], arguments: Arguments) -> list[Prepared]:
        """The step function for each microbatch of a batch; collective where it is new.

        The first one makes the plan, and gives up the variables of other ranks.
        """
        samples = arguments.num_samples
        self._agreement.refuse_text(arguments)  # before its trace fails over shapes that follow from values
        if self._schedules is None:
            self._place(function, arguments)
        if samples is None:
            # Pieces are built for microbatches of a known size, when a batch comes; shapes stay open.
            known = self._of_size(function, arguments, 1)
            prepared = [replace(known, trace=self._trace(function, arguments, None))]
        else:
            sizes = microbatch_sizes(samples, self._num_microbatches)
            of_size = {size: self._of_size(function, arguments, size) for size in dict.fromkeys(sizes)}
            prepared = [of_size[size] for size in sizes]
        self._call_hooks()
        return prepared

    def loss_reduction(
        self, function: Callable[..., Any], arguments: Arguments
    ) -> tuple[Trace, LossReduction]:
        """How the losses of a step rest on samples; what they are divided by comes with each batch then."""
        prepared, samples = self.prepare(function, arguments)[0], arguments.num_samples
        assert samples is not None
        graph, size = prepared.program.graph, microbatch_sizes(samples, self._num_microbatches)[0]
        if max(spec.num_bytes for spec in graph.specs.values()) > _MOST_BYTES:
            size = 1
        try:
            once, twice = (self._trace(function, arguments, each) for each in (size, 2 * size))
        except Exception:  # whatever it is: the step may be written for one size
            return prepared.trace, LossReduction("unknown")
        found = loss_reduction(graph, once, twice, once.recorder.losses)
        if found.divisors:
            self._divisors[id(function)] = found.divisors
            for key in [key for key in self._prepared if key[0] == id(function)]:
                del self._prepared[key]
            self.prepare(function, arguments)
        return prepared.trace, found

    def run(
        self, function: Callable[..., Any], arguments: Arguments, *, expected: int | None = None
    ) -> tuple[list[Any], list[Prepared]]:
        """Runs a batch; collective over the replica. Gives the tensors that this rank gets, in order."""
        if self._failure:
            raise UsageError(
                "an earlier step failed in its middle on this rank, and ranks have messages under way that "
                f"nobody will take. Restart the script from a checkpoint. The failure was {self._failure}"
            )
        context, begun_s = self._context, time.perf_counter()
        name = f"the step function {getattr(function, '__qualname__', function)}"
        with first_cause_named(context), call_together(name, range(context.mesh.world_size)):
            arguments = self._agreement.on_batch(arguments)
            prepared = self.prepare(function, arguments)
            if arguments.num_samples is None:
                raise UsageError(f"{name} gets no tensor that can be cut into microbatches.")
            parts = arguments.parts(self._num_microbatches)
            if expected is not None and len(parts) != expected:
                raise UsageError(
                    f"{name} gets a batch of {arguments.num_samples} samples inside of a tf.function that "
                    f"was traced for {expected} microbatches without knowing the number of samples. Leave "
                    "out smaller batches (drop_remainder=True in tf.data), or call the tf.function "
                    "with batches whose shape is known, and without an input_signature."
                )
            each = [one.divisors for one in prepared if one.divisors is not None]
            if each:
                sizes = microbatch_sizes(arguments.num_samples, self._num_microbatches)
                total_of = list if self._replicas is None else self._replicas.totals
                parts = with_shares(each, parts, sizes, total_of)
            try:
                with self._cores.in_force():
                    results, schedule = self._run(prepared, parts)
            except BaseException as error:
                self._failure = f"{type(error).__name__}: {error}"
                if context.watch.blame is not None:
                    context.watch.blame.stop()
                raise
            if prepared[0].program.routes.trains:
                self._step_end.come(
                    arguments,
                    losses=_losses(prepared, results),
                    schedule=schedule,
                    row=self.measured_row,
                    begun_s=begun_s,
                )
        outputs = prepared[0].outputs
        return outputs.flat(results, len(parts), rank=context.pipeline_rank), prepared

    @property
    def averages_replicas(self) -> bool:
        """Whether gradients come as means over the microbatches of all replicas, and not as sums."""
        return self._replicas is not None

    @property
    def measured_row(self) -> MeasuredRow:
        """When this rank did what in the last batch; nothing where one rank has the whole model."""
        return MeasuredRow() if self._executor is None else self._executor.row

    def _lent(self, variables: Sequence[Any]) -> AbstractContextManager[None]:
        return self._variables.lent(variables, is_tracing=lambda: self.is_tracing)

    def _call_hooks(self) -> None:
        """Calls what waits for the placement; eagerly, also where a ``tf.function`` is being traced."""
        while self.after_placement:
            with tf.init_scope():
                self.after_placement.pop(0)()

    def num_microbatches_of(self, arguments: Arguments) -> int:
        """Into how many microbatches a batch is cut, as far as its size is known; after `prepare`."""
        samples = arguments.num_samples
        return self._num_microbatches if samples is None else min(samples, self._num_microbatches)

    @property
    def is_placed(self) -> bool:
        """Whether a step has given each variable of the model a rank."""
        return bool(self._prepared)

    @property
    def _num_microbatches(self) -> int:
        assert self._context.plan is not None
        return self._context.plan.schedule.microbatches

    # ---- a batch ----

    def _run(
        self, prepared: Sequence[Prepared], parts: Sequence[Sequence[Any]]
    ) -> tuple[Results, Schedule | None]:
        outputs = prepared[0].outputs
        programs = [each.program for each in prepared]
        changed = {id(one.variable): one for each in prepared for one in each.changed}.values()
        schedule: Schedule | None = None
        if self._executor is None:
            results = _run_whole(prepared, parts)
        else:
            assert self._schedules is not None
            trains = programs[0].routes.trains
            schedule = self._schedules.of_batch(programs, trains=trains)
            watches = trains and self._step_end.watches_memory
            results = self._executor.run(programs, schedule, parts, watch_memory=watches)
            exchange_results(self._context, programs, results, outputs)
            share_variables(
                self._context, [(each.variable, each.holder) for each in changed if not each.is_of_model]
            )
        if self._replicas is not None:
            self._replicas.average(results, len(parts))
            # Running statistics; whole numbers are counters and seeds, which replicas have for themselves.
            self._replicas.share(
                [
                    each.variable
                    for each in changed
                    if each.is_of_model
                    and each.holder == self._context.pipeline_rank
                    and each.variable.dtype.is_floating
                ]
            )
        return results, schedule

    # ---- before it ----

    def _place(self, function: Callable[..., Any], arguments: Arguments) -> None:
        """Makes the plan from the first batch, and puts it into effect."""
        context, planning = self._context, self._planning

        def trace(size: int) -> Trace:
            return self._trace(function, arguments, size)

        if context.plan is None:
            if arguments.num_samples is None and context.config.microbatches is None:
                raise UsageError(
                    "the number of samples is not known when tf.function traces its first step, so the "
                    "planner cannot choose a number of microbatches. Set microbatches, or give tf.function "
                    "a batch whose shape is known (drop_remainder=True in tf.data)."
                )
            if arguments.num_samples is None:
                warnings.warn(
                    "tf.function traces its first step without knowing the number of samples, so the plan "
                    "counts time and memory for one sample in a microbatch. For exact figures, give it a "
                    "batch whose shape is known (drop_remainder=True in tf.data).",
                    stacklevel=2,
                )
            context.plan = planning.plan(arguments, trace)
        elif arguments.num_samples is not None:
            size = microbatch_sizes(arguments.num_samples, context.plan.schedule.microbatches)[0]
            planning.check(context.plan, trace(size), size)
        assert context.reporter is not None
        context.reporter.plan_made(context.plan)
        self._schedules = BatchSchedules(context.plan.schedule, stage_costs_of(context.plan))
        if context.mesh.pipeline > 1:
            assert context.links.transport is not None
            self._executor = Executor(context.links.transport, context.device)

    def _of_size(self, function: Callable[..., Any], arguments: Arguments, size: int) -> Prepared:
        key = self._key(function, arguments, size)
        if key not in self._prepared:
            trace = self._trace(function, arguments, size)
            rows = self._rows_of(trace, function, arguments, size)
            self._prepared[key] = self._prepare(trace, rows, self._divisors.get(id(function), {}))
        return self._prepared[key]

    def _rows_of(
        self, trace: Trace, function: Callable[..., Any], arguments: Arguments, size: int
    ) -> dict[int, tuple[Rows, ...]]:
        """The outputs of a trace with rows of which the whole batch has as many."""
        if self._num_microbatches == 1:
            return {}
        whole = arguments.num_samples
        if whole == size:  # a batch of one microbatch, of the size that larger batches may have as well
            whole = 2 * size

        return rows_of(
            trace,
            lambda recorder: self._traced(function, arguments, whole, recorder),
            samples=None if whole is None else (size, whole),
        )

    def _prepare(
        self, trace: Trace, rows: Mapping[int, tuple[Rows, ...]], kinds: Mapping[str, Kind]
    ) -> Prepared:
        context, planning = self._context, self._planning
        assert context.plan is not None
        program = planning.program(context.plan, trace, given=list(kinds))
        divisors = Divisors(program.graph, trace, kinds) if kinds else None
        outputs = Outputs.of(
            trace,
            program.graph,
            is_of_model=planning.is_of_model,
            holder=program.holder,
            rows=rows,
        )
        if context.mesh.pipeline > 1:
            self._variables.give_up(
                planning.holders(context.plan),
                is_tracing=lambda: self.is_tracing,
                ranks=context.pipeline_ranks,
            )
        self._variables.make_delayed()
        if self._replicas is not None:
            self._replicas.begin_with(
                [
                    variable
                    for variable in self._model.variables
                    if not self._variables.is_remote(variable) and tf_variable(variable).dtype.is_floating
                ]
            )
        return Prepared(trace, outputs, program, self._changed(program), divisors)

    def _changed(self, program: Program) -> tuple[Changed, ...]:
        found = []
        for number in sorted(program.graph.written()):
            variable = program.trace.variable_of(number)
            if variable is not None:
                is_of_model = self._planning.is_of_model(variable)
                found.append(Changed(variable, program.holder(number), is_of_model))
        return tuple(found)

    def _trace(self, function: Callable[..., Any], arguments: Arguments, size: int | None) -> Trace:
        key = self._key(function, arguments, size)
        if key not in self._traces:
            self._traces[key] = self._traced(function, arguments, size, Recorder())
        return self._traces[key]

    def _traced(
        self, function: Callable[..., Any], arguments: Arguments, size: int | None, recorder: Recorder
    ) -> Trace:
        def flat(*tensors: Any) -> Any:
            args, kwargs = arguments.rebuild(tensors)
            result = function(*args, **kwargs)
            # Replicas would have different rows of a sparse gradient.
            return result if self._replicas is None else tf.nest.map_structure(dense, result)

        name = getattr(function, "__qualname__", "the step function")
        self.is_tracing, self.recorder = True, recorder
        try:
            trace = trace_step(flat, arguments.specs(size), name=name, recorder=recorder)
        finally:
            self.is_tracing, self.recorder = False, None
        self.goes_on = self.goes_on or recorder.goes_on
        if self.goes_on is not None and self._context.mesh.pipeline > 1:
            raise goes_on_after_update(self.goes_on)
        return trace

    def _key(
        self, function: Callable[..., Any], arguments: Arguments, size: int | None
    ) -> tuple[Hashable, ...]:
        self._functions[id(function)] = function  # kept, so that no other one gets its id
        specs = tuple((tuple(spec.shape), spec.dtype.name) for spec in arguments.specs(size))
        return id(function), arguments.key, specs


def goes_on_after_update(where: str) -> UsageError:
    """The error for a step that goes on with a variable whose update waits for the end of the batch."""
    return UsageError(
        f"{where} Gradients are applied when the batch has ended, so this would be the value from before; "
        "in one process it is the new one. They are applied at once where a rank has the whole model and "
        'its batch whole: sw.init({"pipeline_parallel_degree": 1, "microbatches": 1}) makes each rank a '
        "replica. Over stages, take all gradients first, and give them to the optimizers then; or make a "
        "step function (@sw.step) for each update, and call one after the other. Optimizers average "
        "variables by themselves (use_ema=True), and clip them by the constraints of layers."
    )


def _losses(prepared: Sequence[Prepared], results: Results) -> list[float]:
    """The loss of each microbatch; none where the step function returns none to all ranks."""
    position = prepared[0].trace.loss
    if position is None or position not in prepared[0].outputs.shared:
        return []
    # By NumPy: an operation of TensorFlow takes ten times as long for one number.
    return [float(kept[position].numpy().mean()) for kept in results.kept]


def _run_whole(prepared: Sequence[Prepared], parts: Sequence[Sequence[Any]]) -> Results:
    """Runs the microbatches one after the other where one rank has the whole model."""
    names = [each.trace.outputs for each in prepared]
    results = Results([positions_of(each) for each in names], summed=prepared[0].outputs.sums)
    for microbatch, (each, part) in enumerate(zip(prepared, parts, strict=True)):
        for name, tensor in each.run_whole(part).items():
            results.take(microbatch, name, tensor)
    return results

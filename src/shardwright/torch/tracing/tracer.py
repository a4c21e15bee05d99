"""The handler of a step function that is being traced.

Units run under fake tensors: shapes, no memory, no weights needed. Operations between units that depend on
no unit and no parameter (*free*: masks, positions) run for real, so Python may look at their values. What a
unit returns is a `DeferredTensor`.
"""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import DeferredReadError, TraceError
from shardwright.model_graph import ModelGraph, Node, Together, Unit
from shardwright.torch._private import HigherOrderOperator, gradient_transform_active, storage_key
from shardwright.torch.counting.cost_counter import CostCounter, class_key
from shardwright.torch.counting.hook_effects import HookEffects
from shardwright.torch.counting.stand_in_data import copy_of_object
from shardwright.torch.counting.traced_draws import TracedDraws
from shardwright.torch.interception.attribute_inputs import FOUND, found_in
from shardwright.torch.interception.deferred import REMEDY, REMEDY_IN_HOOK, DeferredTensor
from shardwright.torch.interception.glue import plain_torch, refuse_gradient_inside_step, without_hooks
from shardwright.torch.interception.loss_checks import (
    refuse_gradient_of,
    refuse_second_backward,
    refuse_several_numbers,
    refuse_untrained,
)
from shardwright.torch.interception.step_code import assumed_loss, in_step_code, reads_values, writes_text
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.python_state.attribute_use import AttributeUse
from shardwright.torch.python_state.filled_containers import append_again, give_back_changes, without_appended
from shardwright.torch.python_state.snapshot import Slot
from shardwright.torch.python_state.watched_numbers import note_used
from shardwright.torch.pytorch import functions
from shardwright.torch.pytorch.layout import order_of
from shardwright.torch.pytorch.module_hooks import forward_hook_is_running
from shardwright.torch.pytorch.source_line import called_from, user_line
from shardwright.torch.pytorch.tree import Structure, flatten, leaves
from shardwright.torch.randomness.python_random import DrawsOfPython
from shardwright.torch.script_collectives.replica_collectives import COLLECTIVES
from shardwright.torch.tracing.aliases import follow_changes
from shardwright.torch.tracing.batch_statistics import TracedStatistics
from shardwright.torch.tracing.call_samples import CallSamples
from shardwright.torch.tracing.glue_buffers import BufferWatch
from shardwright.torch.tracing.hidden_inputs import HiddenInputs
from shardwright.torch.tracing.path import PathRecorder
from shardwright.torch.tracing.real_execution import RealExecution
from shardwright.torch.tracing.recomputed_statistics import RepeatedBuffers
from shardwright.torch.tracing.step_parameters import point_out_foreign, refuse_returned
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.tracing.trace_end import TraceEnd
from shardwright.torch.tracing.trace_recorder import TraceRecorder
from shardwright.torch.tracing.traced_buffers import TracedBuffers
from shardwright.torch.tracing.traced_call import Outcome, TracedCall, is_opaque
from shardwright.torch.tracing.traced_execution import TracedExecution
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["Tracer"]


class Tracer:
    """Runs calls of a step function on tensors without data, and has them written down.

    Args:
        unit_map: the units.
        device: where they compute.
        batch: leaves of the step function's arguments.
        watch: finds out which buffers change.
        state: buffers whose content is a value of the graph.
        counters: changed buffers that every rank keeps.
        was_there: tells whether a tensor that is no parameter and no buffer was there before the trace.
        count_memory: find out what calls need for a moment.
        hooks: knows which hooks of modules change something.
        ends_at: see `TraceEnd`.
        may_read: see `TraceEnd`.

    Attributes:
        before_step: called before every call and before ``backward``.
        after_unit: called after every call of a unit.
        samples: calls of each cost class.
        python_draws: random numbers of Python and NumPy.
        draws: PyTorch's.
        end: where a `ReadingStep` is left.
    """

    intercepts = True
    before_step: Callable[[], None]
    after_unit: Callable[[], None]

    def __init__(
        self,
        unit_map: UnitMap,
        device: torch.device,
        batch: Sequence[Any],
        watch: BufferWatch,
        *,
        state: Collection[str],
        counters: Collection[str],
        was_there: Callable[[Tensor], bool],
        count_memory: bool,
        hooks: HookEffects,
        ends_at: float = math.inf,
        may_read: bool = False,
    ):
        self._unit_map = unit_map
        self._watch = watch
        self._values = TracedValues(unit_map.parameters, device)
        self._buffers = TracedBuffers(self._values, watch.tensors(), state, counters)
        self._recorder = TraceRecorder(self._values, self._buffers, was_there)
        self.end = TraceEnd(self._values, self._recorder, at=ends_at, may_read=may_read)
        self._was_there = was_there
        self._hidden = HiddenInputs(self._values)
        self.samples = CallSamples(self._values, count_memory=count_memory, watch=self._hidden, hooks=hooks)
        self.python_draws = DrawsOfPython(lambda: self.position)
        self.draws = TracedDraws(device, user_line)
        self._path = PathRecorder(batch)
        real = RealExecution(self._values, self._hidden, self._path, self.draws, device)
        self._execution = TracedExecution(self._values, self._hidden, self.draws, real)
        self._loss: int | None = None
        self._backward_at: int | None = None
        self._batch_bytes = 0
        self._recomputes = False
        self._shapes_asked: set[int] = set()
        self._calls: dict[str, int] = {}
        self._mutates: set[str] = set()
        self._repeated_buffers = RepeatedBuffers()
        self._statistics = TracedStatistics()
        self._held = {name: self._values.names_in(module) for name, module in unit_map.modules.items()}

    def note_batch(self, tensors: Sequence[Tensor]) -> None:
        """Takes note of the tensors of the microbatch: that they are saved takes no memory."""
        for tensor in tensors:
            self._recorder.batch_memory.add(storage_key(self._values.as_fake(tensor)))
            self._batch_bytes += tensor.nbytes

    def asked(self, func: Callable[..., Any], item: Any) -> None:
        """Takes note of a tensor whose shape Python knows.

        Args:
            func: which is no operation on tensors.
            item: what it is given.

        Raises:
            TraceError: it copies a tensor that only one rank has.
        """
        value = self._values.find(item)
        if func is Tensor.__deepcopy__:
            self._refuse_copy(item, value)
        elif value is not None and functions.asks_for_shape(func):
            self._shapes_asked.add(value)

    def _refuse_copy(self, item: Any, value: int | None) -> None:
        if id(item) in self._values.lent_for:
            raise TraceError(
                f"{user_line()}: copy.deepcopy() is given a module with {self._values.names[id(item)]}, "
                "which only one rank has. Make the copy before the model is wrapped, and register it in the "
                "model."
            )
        if value is not None:
            raise TraceError(
                f"{user_line()}: copy.deepcopy() is given a tensor that only one rank has. Copy it by "
                "x.detach().clone()."
            )

    @property
    def position(self) -> float:
        """Number of steps so far, and a quarter more behind ``backward``."""
        return len(self._recorder.steps) + (0.0 if self._backward_at is None else 0.25)

    def lend(self, tensor: Tensor) -> Tensor:
        """A fake tensor in place of a parameter or buffer."""
        return self._values.lend(tensor)

    def is_value(self, item: Any) -> bool:
        """Whether a tensor is a value of the graph."""
        return self._values.find(item) is not None

    def changes_memory_of(self, item: Tensor) -> bool:
        """Whether what comes from units went into the memory of a tensor that every rank had."""
        return self._recorder.changes_memory_of(item)

    # ---- what the step function calls ----

    def operation(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a torch function; executes it for real if it is free, else on fake tensors."""
        if func is Tensor.backward:
            return self.backward(args[0], functions.gradient_of_backward(*args[1:], **kwargs))
        if gradient_transform_active():
            raise TraceError(
                f"{user_line()}: torch.func (grad, vjp, jacrev, hessian) is used between units. Use it in "
                "the forward of a module inside the model, which is then placed whole; or take the gradient "
                "by torch.autograd.grad."
            )
        self.before_step()
        items, structure = flatten((args, kwargs))
        note_used(items)
        reads = self._recorder.reads(items)
        parameters = self._values.parameters_among(items)
        self._hidden.read_between(items)
        point_out_foreign(items, self._values.names, self._was_there)
        if not reads and not parameters and func not in COLLECTIVES:
            if self._backward_at is not None:
                refuse_gradient_of(func, args)
            if writes_text(func):
                return func(*args, **kwargs)
            return self._free_operation(func, args, kwargs, items, structure)
        self.end.come_by(reads=reads_values(func))
        if parameters and self._backward_at is not None and func in functions.OF_GRADIENT:
            refuse_gradient_inside_step()
        line = user_line()
        if func in functions.READS_DATA:
            raise self._unreadable(
                f"{line}: {functions.reader_of(func)} reads the value of a tensor that only one rank has.",
                reads,
            )
        if isinstance(func, HigherOrderOperator):
            raise DeferredReadError(
                f"{line}: {functions.name_of(func)}() is given functions, which may use tensors that nobody "
                "sees, and is compiled: it cannot be called between units. Call it in the forward of a "
                "module inside the model, which is then placed whole."
            )
        call = self._call(func, items, structure, reads, line)
        key = self.samples.cost_class(call, functions.name_of(func))
        memory = self.samples.working_memory(key, call)
        self.draws.before_step(self._recorder.num_nodes)
        with plain_torch() if func in functions.CALLS_UNITS else nullcontext():
            outcome = self._execution.operation(call)
        if outcome is None:
            self.end.come_by(reads=True)
            raise self._unreadable(
                f"{line}: the shape of the result of {functions.name_of(func)}() depends on the values of a "
                "tensor that only one rank has.",
                reads,
            )
        self.draws.after_step(self._recorder.num_nodes, draws=outcome.cost.random, free=False)
        self._statistics.note_operation(outcome, line=line)
        node = Node(
            kind="op",
            name=functions.name_of(func),
            inputs=call.inputs,
            outputs=(),
            parameters=parameters,
            cost_class=key,
            flops=outcome.cost.flops,
            work=outcome.cost.work,
            work_bytes=memory.work_bytes,
            weight_bytes=memory.weight_bytes,
            split_work_bytes=memory.split_work_bytes,
            random=outcome.cost.random,
            line=line,
        )
        if in_step_code():
            self.end.note_node(self._recorder.num_nodes)
            if changed := call.changed(outcome):
                self.end.note_change(value for position, value in call.reads if position in changed)
        result = self._recorder.record(node, call, outcome)
        changed_names = self._recorder.steps[-1].changed_parameters
        if changed_names or self._repeated_buffers.are_undecided:
            self._repeated_buffers.note(
                self._recorder.num_nodes - 1,
                undecided=changed_names,
                has_gradient=_have_gradient(outcome),
            )
        if parameters or outcome.cost.random or func in functions.NEED_HISTORY:
            self.end.must_be_traced()
        if in_step_code():
            self.end.note_seen(result)
        return result

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call of a unit and runs it on fake tensors."""
        self.end.come_by()
        self.before_step()
        with plain_torch(), without_hooks(module), self.python_draws.around_unit():
            result = self._unit_call(module, args, kwargs)
        self.after_unit()
        self.end.must_be_traced()
        self.model_returned(result)  # to the step function, if that has called it itself
        return result

    def _unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = self._unit_map.units[id(module)]
        self._refuse_other_weights(module, name)
        recomputed = called_from("torch.utils.checkpoint")
        self._recomputes = self._recomputes or recomputed
        found = found_in(module, self.is_value)
        own = args, {**kwargs, FOUND: found} if found else kwargs
        items, structure = flatten(without_appended(own, self._values.is_made))
        note_used(items)
        reads = self._recorder.reads(items)
        call = self._call(module, items, structure, reads, user_line())
        # Before the call: it may put fake tensors into such an object.
        kept = [
            copy_of_object(fake) if is_opaque(item) else fake
            for item, fake in zip(call.items, call.fakes, strict=True)
        ]
        key = self.samples.cost_class(call, class_key(module), kept)
        append_again(own, call.arguments, self._values.is_made)
        with self._hidden.of_call(self._recorder.num_nodes, module, own, call.fakes):
            memory = self.samples.working_memory(key, call)
            self.draws.before_step(self._recorder.num_nodes)
            outcome = self._execution.unit(call, name, kept)
            self.draws.after_step(self._recorder.num_nodes, draws=outcome.cost.random, free=False)
            known = {id(fake): item for fake, item in zip(call.fakes, items, strict=True) if fake is not item}
            give_back_changes(own, call.arguments, known)
        if found:
            call, found = self._as_read(call, outcome, found)
        fills = self._hidden.fills(own)
        if outcome.written_names:
            self._mutates.add(name)
        self._statistics.note_unit(name, outcome)
        self._repeated_buffers.note(
            self._recorder.num_nodes,
            again=self._values.names_of(outcome.written_again),
            once=self._values.names_of(outcome.written_once),
            undecided=self._values.names_of(outcome.written_undecided),
            has_gradient=_have_gradient(outcome),
        )
        ordinal = self._calls.get(name, 0)
        self._calls[name] = ordinal + 1
        node = Node(
            kind="unit",
            name=name,
            ordinal=ordinal,
            inputs=call.inputs,
            outputs=(),
            # Not what it holds by now: a hook may have put a parameter of another unit into it.
            parameters=tuple(sorted(outcome.cost.parameters - self._held[name])),
            cost_class=key,
            flops=outcome.cost.flops,
            work=outcome.cost.work,
            work_bytes=memory.work_bytes,
            weight_bytes=memory.weight_bytes,
            split_work_bytes=memory.split_work_bytes,
            random=outcome.cost.random,
            detached=call.detached(outcome),
            line=call.line,
        )
        result = self._recorder.record(node, call, outcome, recomputed=recomputed, fills=fills)
        self._recorder.steps[-1].found = tuple(found)
        return result

    def _as_read(
        self, call: TracedCall, outcome: Outcome, found: dict[str, Tensor]
    ) -> tuple[TracedCall, dict[str, Tensor]]:
        """Leaves out what a unit has found in attributes and not used."""
        returned = {id(item) for item in leaves(outcome.output)}
        first = len(call.items) - len(found)
        unused = {
            position
            for position in range(first, len(call.items))
            if id(call.fakes[position]) not in returned and not self._hidden.has_used(call.fakes[position])
        }
        reads = [(position, value) for position, value in call.reads if position not in unused]
        return replace(call, reads=reads), found if len(unused) < len(found) else {}

    def _refuse_other_weights(self, module: nn.Module, name: str) -> None:
        """Refuses a unit whose parameters have been replaced for this call."""
        lent = self._values.lent_for
        named = module.named_parameters()
        other = next((key for key, p in named if id(p) not in lent and not self.is_value(p)), None)
        if other is not None:
            raise TraceError(
                f"{user_line()}: {f'unit {name}' if name else 'the model'} is called with another {other} "
                "than its own (torch.func.functional_call). Weights that are computed have no place on a "
                "stage. Put the code that computes them and calls the module with them into the forward of a "
                "module inside the model, which is then placed whole; or have one stage: "
                "pipeline_parallel_degree 1."
            )

    def model_begins(self) -> None:
        """Ends the trace, if it is to end before the model is called again."""
        self.end.come_by()

    def model_returned(self, result: Any) -> None:
        """Takes note of what the step function gets to see."""
        if in_step_code():
            self.end.note_seen(result)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        """Records where the backward starts."""
        self.end.come_by()
        self.before_step()
        refuse_second_backward(self._backward_at is not None)
        value = self._values.find(loss)
        refuse_untrained(value is not None and self._values[value].fake.requires_grad)
        refuse_several_numbers(loss, gradient)
        self._loss = value
        self._backward_at = len(self._recorder.steps)
        self.end.pass_backward()

    def assume_loss(self) -> None:
        """Adds a loss of all that the step function has seen, and that may get gradients behind the end."""
        if self._backward_at is not None or not torch.is_grad_enabled():
            return
        values, nodes = self._values, self._recorder.nodes()
        trained = (node for node in nodes if any(values[v].has_history for v in node.outputs))
        read = {value for node in trained for value in node.inputs}
        seen = dict.fromkeys(values.find(item) for item in self.end.seen)
        last = [v for v in seen if v is not None and values[v].has_history and v not in read]
        if last:
            loss = self.operation(assumed_loss, tuple(values[v].holder for v in last), {})
            self._loss = self._values.find(loss)
            self._backward_at = len(self._recorder.steps)

    # ---- calls ----

    def _free_operation(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        items: list[Any],
        structure: Structure,
    ) -> Any:
        step = self._recorder.free_step(func, items)
        versions = self._path.versions(items)
        self.draws.before_step(self._recorder.num_nodes, free=True)
        with CostCounter(row=self.draws) as cost:
            result = func(*args, **kwargs)
        self.draws.after_step(self._recorder.num_nodes, draws=cost.random, free=True)
        if cost.random:
            self.end.must_be_traced()
        step.draws = tuple(cost.draws)
        reads = cost.reads_data or func in functions.READS_DATA
        if not reads:
            self._values.follow(func, items, structure, result)
        self._path.note(func, items, structure, result, versions, draws=cost.random, reads=reads)
        return result

    def _call(
        self,
        func: Callable[..., Any],
        items: list[Any],
        structure: Structure,
        reads: list[tuple[int, int]],
        line: str,
    ) -> TracedCall:
        arguments = structure.rebuild([self._values.fake(item) for item in items])
        return TracedCall(func, items, structure, reads, arguments, leaves(arguments), line)

    def _unreadable(self, what: str, reads: list[tuple[int, int]]) -> DeferredReadError:
        in_hook = forward_hook_is_running(self._unit_map.model)
        error = DeferredReadError(f"{what} {REMEDY_IN_HOOK if in_hook else REMEDY}")
        error.buffers = self._recorder.buffers_behind([value for _, value in reads])
        return error

    # ---- the result ----

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Leaves the classes of objects as they were, which are watched inside."""
        try:
            yield
        finally:
            self._hidden.forget()

    def together(self) -> tuple[Together, ...]:
        """Nodes that must have one home; to be asked while buffers still are what the step function left."""
        found = self._recorder.together(self._watch, self._held, self._hidden, trains=self._loss is not None)
        return (*found, *self.draws.together(self._recorder.nodes()))

    def finish(
        self,
        result: Any,
        batch_size: int,
        *,
        together: tuple[Together, ...],
        changes_batch: bool,
        temporary_hooks: bool,
        attributes: tuple[AttributeUse, ...],
        left_in_units: tuple[Slot, ...],
        left: Collection[DeferredTensor],
    ) -> Trace:
        """Makes the graph.

        Args:
            result: what the step function returned.
            batch_size: samples in the microbatch.
            together: nodes that must have one home.
            changes_batch: it changes tensors of its batch in place.
            temporary_hooks: it registers hooks, and has removed them all at its end.
            attributes: changed attributes of modules that it uses between units.
            left_in_units: attributes that units changed.
            left: what is in variables of the script at its end.
        """
        recorder, values = self._recorder, self._values
        recorder.forget_frames()
        recorder.share_results()
        self.draws.at_end(draws=any(step.draws for step in recorder.steps))
        refuse_returned(leaves(result), self._values)
        recorder.reads(leaves(result))
        result_values = tuple(recorder.reads(leaves(result)))
        # Behind its end, it may use all that it has seen.
        seen = (values.find(item) for item in self.end.seen) if self.end.is_found else ()
        returned = (value for _, value in result_values)
        outputs = tuple(dict.fromkeys((*returned, *(value for value in seen if value is not None))))
        follow_changes(recorder.steps, outputs if self._loss is None else (*outputs, self._loss))
        graph = ModelGraph(
            nodes=self._hidden.in_graph(recorder.nodes()),
            values=recorder.values(),
            units={name: self._unit(name) for name in self._calls},
            parameters=self._unit_map.specs,
            loss=self._loss,
            outputs=outputs,
            batch_size=batch_size,
            batch_bytes=self._batch_bytes,
            together=together,
            batch_statistics=self._statistics.layers(
                self._unit_map, self._buffers.initial.values(), samples=batch_size
            ),
        )
        return Trace(
            graph=graph,
            unit_names=tuple(self._unit_map.modules),
            steps=recorder.steps,
            backward_at=self._backward_at,
            result_values=result_values,
            reads_data=self._path.reads_data,
            path=self._path.path(self._unit_map.model, values.names),
            recomputes=self._recomputes,
            changes_batch=changes_batch,
            samples=self.samples.samples,
            temporary_hooks=temporary_hooks,
            state=tuple(dict.fromkeys(self._buffers.initial.values())),
            initial=self._buffers.initial,
            memory=tuple(storage_key(v.fake) for v in values),
            attributes=attributes,
            shapes_asked=frozenset(self._shapes_asked),
            left_in_units=left_in_units,
            python_draws=tuple(self.python_draws.places),
            draws_in_units=self.python_draws.in_units,
            stand_ins=values.stand_ins(),
            end=self.end.at,
            end_line=self.end.line,
            read_at=self.end.read_at,
            wanted_end=self.end.wanted(left),
            generators_set_at=self.draws.set_at,
            repeated_buffers=self._repeated_buffers.names(graph.contributing()),
            orders={
                index: order
                for index, value in enumerate(values)
                if (order := order_of(value.fake)) is not None
            },
        )

    def _unit(self, name: str) -> Unit:
        module = self._unit_map.modules[name]
        tensors = [*module.parameters(), *module.buffers()]
        return Unit(
            name=name,
            class_name=type(module).__name__,
            parameters=tuple(dict.fromkeys(self._unit_map.parameters[id(tensor)] for tensor in tensors)),
            num_calls=self._calls[name],
            mutates_buffers=name in self._mutates,
        )


def _have_gradient(outcome: Outcome) -> bool:
    """Whether gradients come back to a call."""
    return any(isinstance(item, Tensor) and item.requires_grad for item in leaves(outcome.output))

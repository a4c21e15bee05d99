"""Traces the calls of units, and the operations between them."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from shardwright.errors import DeferredReadError, TraceError
from shardwright.model_graph import Unit
from shardwright.torch._private.tensors import HigherOrderOperator
from shardwright.torch.counting.cost_counter import CostCounter, class_key
from shardwright.torch.interception.backward_calls import refuse_gradient_of
from shardwright.torch.interception.deferred import REMEDY, REMEDY_IN_HOOK
from shardwright.torch.interception.glue import plain_torch, refuse_gradient_inside_step
from shardwright.torch.interception.step_code import in_step_code, reads_values, writes_text
from shardwright.torch.interception.unit_attributes import FOUND, found_in
from shardwright.torch.parameters.unit_map import UnitMap
from shardwright.torch.python_state.shared_state import fill
from shardwright.torch.python_state.watched_numbers import plain_numbers
from shardwright.torch.pytorch import functions
from shardwright.torch.pytorch.modules import called_from, forward_hook_is_running, user_line
from shardwright.torch.pytorch.tensors import copy_of_object
from shardwright.torch.pytorch.tree import Structure, flatten, leaves
from shardwright.torch.script_collectives import COLLECTIVES
from shardwright.torch.tracing.recording import Recording
from shardwright.torch.tracing.trace_data import UnitCall
from shardwright.torch.tracing.traced_call import Outcome, TracedCall, is_opaque
from shardwright.torch.tracing.traced_execution import TracedExecution
from shardwright.torch.tracing.traced_values import point_out_foreign
from shardwright.torch.tracing.working_memory import WorkingMemory


class UnitTracer:
    """Runs units on tensors without data, and records their calls.

    Attributes:
        held: unit -> names of the parameters and buffers that it had at the start.
    """

    def __init__(self, recording: Recording, execution: TracedExecution, unit_map: UnitMap):
        self._recording = recording
        self._execution = execution
        self._unit_map = unit_map
        values = recording.values
        self.held = {name: values.names_in(module) for name, module in unit_map.modules.items()}
        self.recomputes = False
        self._num_calls: dict[str, int] = {}
        self._mutates: set[str] = set()

    def call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Traces one call; returns its result with deferred tensors."""
        recording, name = self._recording, self._unit_map.units[id(module)]
        self._refuse_other_weights(module, name)
        recomputed = called_from("torch.utils.checkpoint")
        self.recomputes = self.recomputes or recomputed
        found = found_in(module, recording.values.has)
        own = args, {**kwargs, FOUND: found} if found else kwargs
        items, structure = flatten(own)
        if (plain := plain_numbers(items)) is not None:
            items = plain
            own = structure.rebuild(items)
        reads = recording.recorder.reads(items)
        fake = recording.values.fake
        call = TracedCall.of(module, items, structure, reads, fake=fake, line=user_line())
        outcome, cost_class, memory = self._run(call, name)
        if found:
            call, found = self._as_read(call, outcome, found)
        ordinal = self._num_calls.get(name, 0)
        self._note(name, outcome)
        node = call.node(
            "unit",
            name,
            outcome,
            cost_class=cost_class,
            memory=memory,
            # Not what it holds by now: a hook may have put a parameter of another unit into it.
            parameters=tuple(sorted(outcome.cost.parameters - self.held[name])),
            ordinal=ordinal,
            detached=call.detached(outcome),
        )
        unit = UnitCall(recomputed=recomputed, found=tuple(found))
        return fill(recording.recorder.record(node, call, outcome, unit), *own)

    def units(self) -> dict[str, Unit]:
        """The units that were called, as the graph has them: by name, in the order of their first calls."""
        return {name: self._unit(name) for name in self._num_calls}

    def _run(self, call: TracedCall, name: str) -> tuple[Outcome, str, WorkingMemory]:
        recording = self._recording
        node, module = recording.recorder.num_nodes, call.func
        assert isinstance(module, nn.Module)
        pairs = list(zip(call.items, call.fakes, strict=True))
        # Before the call: it may put fake tensors into such an object.
        kept = [copy_of_object(fake) if is_opaque(item) else fake for item, fake in pairs]
        cost_class = recording.cost_class(call, class_key(module), kept)
        with recording.hidden.of_call(node, module, call.fakes):
            memory = recording.working_memory(cost_class, call)
            recording.draws.before_step(node)
            outcome = self._execution.unit(call, name, kept)
            recording.draws.after_step(node, draws=outcome.cost.random, free=False)
        return outcome, cost_class, memory

    def _as_read(
        self, call: TracedCall, outcome: Outcome, found: dict[str, Tensor]
    ) -> tuple[TracedCall, dict[str, Tensor]]:
        """Leaves out what a unit has found in attributes and not used."""
        returned = {id(item) for item in leaves(outcome.output)}
        has_used = self._recording.hidden.has_used
        first = len(call.items) - len(found)
        unused = {
            position
            for position in range(first, len(call.items))
            if id(call.fakes[position]) not in returned and not has_used(call.fakes[position])
        }
        reads = [(position, value) for position, value in call.reads if position not in unused]
        return replace(call, reads=reads), found if len(unused) < len(found) else {}

    def _note(self, name: str, outcome: Outcome) -> None:
        """Records what a unit has done to itself."""
        recording, values = self._recording, self._recording.values
        self._num_calls[name] = self._num_calls.get(name, 0) + 1
        if outcome.written_names:
            self._mutates.add(name)
        recording.repeated_buffers.update(values.names_of(outcome.written_again))
        if outcome.cost.normalises:
            recording.batch_norms[name] = None

    def _refuse_other_weights(self, module: nn.Module, name: str) -> None:
        """Refuses a unit whose parameters have been replaced for this call."""
        values, named = self._recording.values, module.named_parameters()
        other = next((key for key, p in named if id(p) not in values.lent_for and not values.has(p)), None)
        if other is not None:
            raise TraceError(
                f"{user_line()}: {f'unit {name}' if name else 'the model'} is called with another {other} "
                "than its own (torch.func.functional_call). Weights that are computed have no place on a "
                "stage. Put the code that computes them and calls the module with them into the forward of a "
                "module inside the model, which is then placed whole; or have one stage: "
                "pipeline_parallel_degree 1."
            )

    def _unit(self, name: str) -> Unit:
        module = self._unit_map.modules[name]
        tensors = [*module.parameters(), *module.buffers()]
        return Unit(
            name=name,
            class_name=type(module).__name__,
            parameters=tuple(dict.fromkeys(self._unit_map.parameters[id(tensor)] for tensor in tensors)),
            num_calls=self._num_calls[name],
            mutates_buffers=name in self._mutates,
        )


class OperationTracer:
    """Runs torch functions on tensors without data, or for real where they are free, and records them."""

    def __init__(
        self,
        recording: Recording,
        execution: TracedExecution,
        model: nn.Module,
        was_there: Callable[[Tensor], bool],
    ):
        self._recording = recording
        self._execution = execution
        self._model = model
        self._was_there = was_there

    def call(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        found = self._recording
        items, structure = flatten((args, kwargs))
        if (plain := plain_numbers(items)) is not None:
            items = plain
            args, kwargs = structure.rebuild(items)
        reads = found.recorder.reads(items)
        parameters = found.values.parameters_among(items)
        found.hidden.read_between(items)
        point_out_foreign(items, found.values.names, self._was_there)
        if reads or parameters or func in COLLECTIVES:
            found.end.come_by(reads=reads_values(func))
            line = user_line()
            self._refuse(func, reads, parameters, line)
            call = TracedCall.of(func, items, structure, reads, fake=found.values.fake, line=line)
            return self._placed(call, parameters)
        if found.recorder.backward_at is not None:
            refuse_gradient_of(func, args)
        if writes_text(func):
            return func(*args, **kwargs)
        return self._free(func, args, kwargs, items, structure)

    def _refuse(
        self,
        func: Callable[..., Any],
        reads: list[tuple[int, int]],
        parameters: tuple[str, ...],
        line: str,
    ) -> None:
        """Refuses an operation that no rank could do for the others."""
        if parameters and self._recording.recorder.backward_at is not None and func in functions.OF_GRADIENT:
            refuse_gradient_inside_step()
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

    def _placed(self, call: TracedCall, parameters: tuple[str, ...]) -> Any:
        found, name = self._recording, functions.name_of(call.func)
        cost_class = found.cost_class(call, name)
        memory = found.working_memory(cost_class, call)
        outcome = self._run(call)
        if outcome.cost.normalises:
            found.batch_norms[f"batch_norm at {call.line}"] = None
        node = call.node("op", name, outcome, cost_class=cost_class, memory=memory, parameters=parameters)
        if in_step_code():
            self._note_for_end(call, outcome)
        result = found.recorder.record(node, call, outcome)
        if parameters or outcome.cost.random or call.func in functions.NEED_HISTORY:
            found.end.must_be_traced()
        if in_step_code():
            found.end.note_seen(result)
        return result

    def _run(self, call: TracedCall) -> Outcome:
        found, node = self._recording, self._recording.recorder.num_nodes
        found.draws.before_step(node)
        with plain_torch() if call.func in functions.CALLS_UNITS else nullcontext():
            outcome = self._execution.operation(call)
        if outcome is None:
            found.end.come_by(reads=True)
            raise self._unreadable(
                f"{call.line}: the shape of the result of {functions.name_of(call.func)}() depends on the "
                "values of a tensor that only one rank has.",
                call.reads,
            )
        found.draws.after_step(node, draws=outcome.cost.random, free=False)
        return outcome

    def _note_for_end(self, call: TracedCall, outcome: Outcome) -> None:
        """Tells the end of the trace that code of the step function makes a node, and may change tensors."""
        end = self._recording.end
        end.note_node(self._recording.recorder.num_nodes)
        if changed := call.changed(outcome):
            end.note_change(value for position, value in call.reads if position in changed)

    def _free(
        self,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        items: list[Any],
        structure: Structure,
    ) -> Any:
        """Traces an operation that rests on no unit and no parameter: every rank has the data to run it."""
        found, node = self._recording, self._recording.recorder.num_nodes
        step = found.recorder.free_step(func, items)
        versions = found.path.versions(items)
        found.draws.before_step(node, free=True)
        with CostCounter(row=found.draws) as cost:
            result = func(*args, **kwargs)
        found.draws.after_step(node, draws=cost.random, free=True)
        if cost.random:
            found.end.must_be_traced()
        step.draws = tuple(cost.draws)
        reads = cost.reads_data or func in functions.READS_DATA
        if not reads:
            found.values.follow(func, items, structure, result)
        found.path.note(func, items, structure, result, versions, draws=cost.random, reads=reads)
        return result

    def _unreadable(self, what: str, reads: list[tuple[int, int]]) -> DeferredReadError:
        in_hook = forward_hook_is_running(self._model)
        error = DeferredReadError(f"{what} {REMEDY_IN_HOOK if in_hook else REMEDY}")
        error.buffers = self._recording.recorder.buffers_behind([value for _, value in reads])
        return error

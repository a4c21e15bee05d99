"""Traces the operations of a step function between units."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from shardwright.errors import DeferredReadError
from shardwright.torch._private import HigherOrderOperator
from shardwright.torch.counting.cost_counter import CostCounter
from shardwright.torch.interception.backward_calls import refuse_gradient_of
from shardwright.torch.interception.deferred import REMEDY, REMEDY_IN_HOOK
from shardwright.torch.interception.glue import plain_torch, refuse_gradient_inside_step
from shardwright.torch.interception.step_code import in_step_code, reads_values, writes_text
from shardwright.torch.python_state.watched_numbers import plain_numbers
from shardwright.torch.pytorch import functions
from shardwright.torch.pytorch.modules import forward_hook_is_running
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import Structure, flatten
from shardwright.torch.script_collectives import COLLECTIVES
from shardwright.torch.tracing.calls.traced_call import Outcome, TracedCall
from shardwright.torch.tracing.calls.traced_execution import TracedExecution
from shardwright.torch.tracing.recording import Recording
from shardwright.torch.tracing.step_parameters import point_out_foreign

__all__ = ["OperationTracer"]


class OperationTracer:
    """Runs torch functions on tensors without data, or for real where they are free, and records them.

    Args:
        recording: of the trace.
        execution: runs calls on tensors without data.
        model: the whole model.
        was_there: tells whether a tensor that is no parameter and no buffer was there before the trace.
    """

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
        """Traces one call.

        Raises:
            DeferredReadError: it reads a value that only one rank has.
        """
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
        """Traces an operation that has a place on a rank."""
        found, name = self._recording, functions.name_of(call.func)
        cost_class = found.samples.cost_class(call, name)
        memory = found.samples.working_memory(cost_class, call)
        outcome = self._run(call)
        found.statistics.note_operation(outcome, line=call.line)
        node = call.node("op", name, outcome, cost_class=cost_class, memory=memory, parameters=parameters)
        if in_step_code():
            self._note_for_end(call, outcome)
        result = found.recorder.record(node, call, outcome)
        changed = found.recorder.steps[-1].changed_parameters
        if changed or found.repeated_buffers.are_undecided:
            at = found.recorder.num_nodes - 1
            found.repeated_buffers.note(at, undecided=changed, has_gradient=outcome.has_gradient)
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

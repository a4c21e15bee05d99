"""The handler of a step function that is being traced.

Units run under fake tensors: shapes, no memory, no weights needed. Operations between units that depend on
no unit and no parameter (*free*: masks, positions) run for real, so Python may look at their values. What a
unit returns is a `DeferredTensor`.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.errors import TraceError
from shardwright.model_graph import ModelGraph, Together
from shardwright.torch._private.modules import gradient_transform_active
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.backward.batch_data import BatchData
from shardwright.torch.backward.loss_reduction import LossForm, Shadows, form_of_loss
from shardwright.torch.interception.backward_calls import (
    refuse_second_backward,
    refuse_several_numbers,
    refuse_untrained,
)
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.glue import plain_torch, without_hooks
from shardwright.torch.interception.step_code import assumed_loss, in_step_code
from shardwright.torch.parameters.quantized import shapes_of_quantized
from shardwright.torch.pytorch import functions
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tracing.batch_statistics import layers_with_statistics
from shardwright.torch.tracing.recording import Recording
from shardwright.torch.tracing.together import BufferWatch
from shardwright.torch.tracing.trace_data import SideEffects, Trace, TraceRequest
from shardwright.torch.tracing.traced_call import follow_changes
from shardwright.torch.tracing.traced_execution import TracedExecution
from shardwright.torch.tracing.traced_values import refuse_returned
from shardwright.torch.tracing.unit_tracer import OperationTracer, UnitTracer


class Tracer:
    """Runs calls of a step function on tensors without data, and has them recorded.

    Attributes:
        before_step: called before every call, with the leaves of its arguments, and before ``backward``.
        after_unit: called after every call of a unit.
    """

    intercepts = True
    is_trace = True
    before_step: Callable[[Sequence[Any]], None]
    after_unit: Callable[[], None]

    def __init__(
        self,
        request: TraceRequest,
        recording: Recording,
        watch: BufferWatch,
        *,
        was_there: Callable[[Tensor], bool],
    ):
        self._request = request
        self._watch = watch
        self._recording = recording
        self._end = recording.end
        self._values = values = recording.values
        self._recorder = recording.recorder
        execution = TracedExecution(values, recording.hidden, recording.path, recording.draws, request.device)
        self._operations = OperationTracer(recording, execution, request.unit_map.model, was_there)
        self._units = UnitTracer(recording, execution, request.unit_map)
        self._batch_bytes = 0
        self._batch_shapes: list[tuple[int, ...]] = []
        self._shapes_asked: set[int] = set()
        self._constants: set[int] = set()
        self._loss: LossForm | None = None
        self._shadows = None if torch.is_grad_enabled() else Shadows(values.fake)
        self._data = BatchData(self._request.batch_size, self._is_trained)

    def note_batch(self, tensors: Sequence[Tensor]) -> None:
        """Records the tensors of the microbatch: that autograd saves them takes no memory."""
        for tensor in tensors:
            memory = storage_key(self._values.as_fake(tensor))
            self._recorder.batch_memory.add(memory)
            if not tensor.dim():  # a number of the whole batch, which is not cut
                self._constants.add(memory)
            self._batch_bytes += tensor.nbytes
            self._batch_shapes.append(tuple(tensor.shape))

    def asked(self, func: Callable[..., Any], item: Any) -> None:
        """Records a tensor whose shape Python asks for."""
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
        self.before_step(leaves((args, kwargs)))
        result = self._operations.call(func, args, kwargs)
        if self._shadows is not None:
            with plain_torch():
                self._shadows.operation(func, args, kwargs, result)
        elif in_step_code():
            with plain_torch():
                self._data.operation(func, args, kwargs, result)
        return result

    def _is_trained(self, tensor: Tensor) -> bool:
        value = self._values.find(tensor)
        return value is not None and self._values[value].has_history

    def unit_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Records a call of a unit and runs it on fake tensors."""
        if self._request.on_unit is not None:
            self._request.on_unit()
        self._end.come_by()
        self.before_step(leaves((args, kwargs)))
        with plain_torch(), without_hooks(module), self._recording.python_draws.around_unit():
            result = self._units.call(module, args, kwargs)
            if self._shadows is not None:
                self._shadows.begin(leaves(result))
        self.after_unit()
        self._end.must_be_traced()
        self.model_returned(result)  # to the step function, if that has called it itself
        return result

    def model_begins(self) -> None:
        """Ends the trace, if it is to end before the model is called again."""
        self._end.come_by()

    def model_returned(self, result: Any) -> None:
        """Records what the step function gets to see."""
        if in_step_code():
            self._end.note_seen(result)

    def backward(self, loss: Tensor, gradient: Tensor | None) -> None:
        self._end.come_by()
        self.before_step([loss])
        refuse_second_backward(self._recorder.backward_at is not None)
        value = self._values.find(loss)
        refuse_untrained(value is not None and self._values[value].fake.requires_grad)
        refuse_several_numbers(loss, gradient)
        if gradient is None and value is not None:
            shapes = shapes_of_quantized(self._request.unit_map.model)
            form = form_of_loss(
                self._values[value].fake,
                samples=self._request.batch_size,
                is_constant=lambda tensor: storage_key(tensor) in self._constants,
                is_fixed=lambda tensor: (
                    tensor.shape in shapes or bool(self._values.lent_in([storage_key(tensor)]))
                ),
            )
            # Counts would hold on to all that was computed.
            of_data, is_clamped = self._data.found or form.of_data, self._data.is_clamped
            self._loss = replace(form, counts=(), of_data=of_data, is_clamped=is_clamped)
        self._recorder.pass_backward(value)

    def assume_loss(self) -> None:
        """Adds a loss of all that the step function has seen, and that may get gradients behind the end."""
        if self._recorder.backward_at is not None or not torch.is_grad_enabled():
            return
        values, nodes = self._values, self._recorder.nodes()
        trained = (node for node in nodes if any(values[v].has_history for v in node.outputs))
        read = {value for node in trained for value in node.inputs}
        seen = dict.fromkeys(values.find(item) for item in self._end.seen)
        last = [v for v in seen if v is not None and values[v].has_history and v not in read]
        if last:
            loss = self.operation(assumed_loss, tuple(values[v].holder for v in last), {})
            self._recorder.pass_backward(self._values.find(loss))

    # ---- the result ----

    def together(self) -> tuple[Together, ...]:
        """Nodes that must have one home; to be asked while buffers still are what the step function left."""
        found = self._recorder.together(self._watch, self._units.held, self._recording.hidden)
        return (*found, *self._recording.draws.together(self._recorder.nodes()))

    def finish(
        self,
        result: Any,
        *,
        together: tuple[Together, ...],
        effects: SideEffects,
        left: Collection[DeferredTensor],
    ) -> Trace:
        recording, recorder, unit_map = self._recording, self._recorder, self._request.unit_map
        recorder.forget_frames()
        recorder.share_results()
        self._recording.draws.at_end(draws=any(step.draws for step in recorder.steps))
        refuse_returned(leaves(result), self._values)
        evaluated: dict[int, LossForm] = {}
        if recorder.backward_at is None:
            shadows = self._shadows or Shadows(self._values.fake)
            evaluated = shadows.forms(result, samples=self._request.batch_size)
        result_values = tuple(recorder.reads(leaves(result)))
        graph = self._graph([value for _, value in result_values], together)
        tensors = recording.tensor_facts(self._shapes_asked)
        # A buffer whose content is a value of the graph takes over that of a tensor of its own shape.
        state = frozenset(tensors.initial.values())
        replaced = {n: how for n, how in effects.replaced_buffers.items() if how or n not in state}
        return Trace(
            graph=graph,
            tensors=tensors,
            unit_names=tuple(unit_map.modules),
            steps=recorder.steps,
            backward_at=recorder.backward_at,
            result_values=result_values,
            path=recording.path.path(unit_map.model, self._values.names),
            recomputes=self._units.recomputes,
            repeated_buffers=frozenset(recording.repeated_buffers),
            random=recording.random_use(),
            effects=replace(effects, replaced_buffers=replaced),
            end=self._end.end(left),
            loss=self._loss,
            evaluated=evaluated,
            samples=recording.samples,
            batch_shapes=tuple(self._batch_shapes),
        )

    def _graph(self, returned: Sequence[int], together: tuple[Together, ...]) -> ModelGraph:
        recording, recorder, request = self._recording, self._recorder, self._request
        # Behind its end, it may use all that it has seen.
        seen = (self._values.find(item) for item in self._end.seen) if self._end.is_found else ()
        outputs = tuple(dict.fromkeys((*returned, *(value for value in seen if value is not None))))
        follow_changes(recorder.steps, outputs if recorder.loss is None else (*outputs, recorder.loss))
        return ModelGraph(
            free_operations=sum(step.node is None for step in recorder.steps),
            nodes=recording.hidden.in_graph(recorder.nodes()),
            values=recorder.values(),
            units=self._units.units(),
            parameters=request.unit_map.specs,
            loss=recorder.loss,
            outputs=outputs,
            batch_size=request.batch_size,
            batch_bytes=self._batch_bytes,
            together=together,
            batch_statistics=layers_with_statistics(request.unit_map.model, recording.batch_norms),
        )

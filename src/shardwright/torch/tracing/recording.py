"""The collectors of a trace, each of one kind of facts about the step function that runs."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from shardwright.runtime.traced import TensorFacts
from shardwright.torch._private import storage_key
from shardwright.torch.counting.traced_draws import TracedDraws
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tensors import order_of
from shardwright.torch.randomness import DrawsOfPython
from shardwright.torch.tracing.batch_statistics import TracedStatistics
from shardwright.torch.tracing.calls.call_samples import CallSamples
from shardwright.torch.tracing.end_finder import EndFinder
from shardwright.torch.tracing.hidden_inputs import HiddenInputs
from shardwright.torch.tracing.path import PathRecorder
from shardwright.torch.tracing.recomputed_statistics import RepeatedBuffers
from shardwright.torch.tracing.trace_data import RandomUse
from shardwright.torch.tracing.trace_recorder import TraceRecorder
from shardwright.torch.tracing.trace_request import TraceRequest
from shardwright.torch.tracing.traced_buffers import TracedBuffers
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["Recording"]


class Recording:
    """Collects the facts of a trace while the step function runs.

    Args:
        request: the step function, and how it is traced.
        batch: leaves of its arguments.
        buffers: those outside of units, by first name.
        state: names of those whose content is a value of the graph.
        counters: names of changed ones that every rank keeps.
        was_there: tells whether a tensor that is no parameter and no buffer was there before the trace.

    Attributes:
        values: the values of the graph, and all fake tensors.
        buffers: those outside of units.
        recorder: the steps, and the nodes of the graph.
        end: where a `ReadingStep` is left.
        hidden: what units use without having been given it.
        samples: calls of each cost class.
        python_draws: random numbers of Python and NumPy.
        draws: PyTorch's.
        path: the free operations, and what Python reads of their results.
        statistics: layers that compute statistics over samples.
        repeated_buffers: buffers that ``torch.utils.checkpoint`` changes a second time.
    """

    def __init__(
        self,
        request: TraceRequest,
        batch: Sequence[Any],
        buffers: Mapping[str, Tensor],
        *,
        state: Collection[str],
        counters: Collection[str],
        was_there: Callable[[Tensor], bool],
    ):
        self.values = values = TracedValues(request.unit_map.parameters, request.device)
        self.buffers = TracedBuffers(values, buffers, state, counters)
        self.recorder = recorder = TraceRecorder(values, self.buffers, was_there)
        self.end = EndFinder(values, recorder, at=request.ends_at, may_read=request.may_read)
        self.hidden = HiddenInputs(values)
        self.samples = CallSamples(
            values,
            request.memory,
            watch=self.hidden,
            hooks=request.hooks,
        )
        self.python_draws = DrawsOfPython(lambda: recorder.position)
        self.draws = TracedDraws(request.device, user_line)
        self.path = PathRecorder(batch)
        self.statistics = TracedStatistics()
        self.repeated_buffers = RepeatedBuffers()

    def tensor_facts(self, shapes_asked: Iterable[int]) -> TensorFacts:
        """Facts about the tensors behind the values.

        Args:
            shapes_asked: values whose shape Python has asked for.
        """
        orders = {index: order_of(value.fake) for index, value in enumerate(self.values)}
        return TensorFacts(
            memory=tuple(storage_key(value.fake) for value in self.values),
            orders={index: order for index, order in orders.items() if order is not None},
            initial=self.buffers.initial,
            stand_ins=self.values.stand_ins(),
            shapes_asked=frozenset(shapes_asked),
        )

    def random_use(self) -> RandomUse:
        """Random numbers that the steps do not tell of."""
        return RandomUse(
            python_at=tuple(self.python_draws.places),
            python_in_units=self.python_draws.in_units,
            set_at=self.draws.set_at,
        )

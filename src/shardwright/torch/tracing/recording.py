"""The collectors of a trace, each of one kind of facts; the end of a trace whose step function reads."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.runtime.traced import TensorFacts
from shardwright.torch._private.modules import num_hooks_registered
from shardwright.torch._private.tensors import storage_key
from shardwright.torch.counting.cost_counter import cost_class
from shardwright.torch.counting.operation_work import TracedDraws
from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.step_code import TraceEnds, in_step_code
from shardwright.torch.pytorch.modules import user_line
from shardwright.torch.pytorch.tensors import autocast_state, order_of
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.randomness import DrawsOfPython
from shardwright.torch.tracing.hidden_inputs import HiddenInputs
from shardwright.torch.tracing.path import PathRecorder
from shardwright.torch.tracing.together import TracedBuffers
from shardwright.torch.tracing.trace_data import RandomUse, Sample, TraceEnd, TraceRequest
from shardwright.torch.tracing.trace_recorder import TraceRecorder
from shardwright.torch.tracing.traced_call import TracedCall
from shardwright.torch.tracing.traced_values import TracedValues
from shardwright.torch.tracing.working_memory import WorkingMemory, working_memory


class EndFinder:
    """Finds the end while the step function runs, and leaves it there.

    Places are numbers of nodes so far, and a quarter more behind ``backward``: the same on all ranks. A trace
    ends where the step function reads a value. It has to end earlier, and is made again, where

    - another rank ends its own earlier;
    - the step function changes tensors in place, of which other ranks would have the content of before;
    - it makes what it leaves in a variable of the script, which must hold a tensor on every rank.

    But never before what only a trace can cover: units, parameters, random numbers.

    Attributes:
        at: the place at which it was left, or is to be; infinite where it is not.
        line: where that is in the script; empty where it is nowhere.
        read_at: the line that reads a value there; empty where none does.
        changed_at: the first place from which it changes tensors, and does nothing that only a trace can
            cover; infinite where there is none.
        seen: values that its code got to see.
    """

    def __init__(self, values: TracedValues, recorder: TraceRecorder, *, at: float, may_read: bool):
        self.at = at
        self.line = self.read_at = ""
        self.changed_at = math.inf
        self.seen: list[Tensor] = []
        self._values = values
        self._recorder = recorder
        self._may_read = may_read
        self._places: dict[int, float] = {}  # of the nodes that code of the step function makes
        self._traced_up_to = 0.0  # the place behind what no trace may leave out

    @property
    def _place(self) -> float:
        return self._recorder.num_nodes + (0.25 if self._is_behind_backward else 0.0)

    @property
    def _is_behind_backward(self) -> bool:
        return self._recorder.backward_at is not None

    @property
    def is_found(self) -> bool:
        """Whether the trace ends before the step function does, or at the latest then."""
        return math.isfinite(self.at)

    def come_by(self, *, reads: bool = False) -> None:
        """Leaves the step function at its end."""
        if not in_step_code():
            return
        if reads or (self._may_read and self._is_behind_backward):
            self.at = min(self.at, self._place)
        if self._place >= self.at:
            self.line = user_line()
            self.read_at = self.line if reads else ""
            raise TraceEnds

    def step_returned(self) -> None:
        """Ends the trace of a step function that has returned, if it may read values."""
        if self._may_read:
            self.at = min(self.at, self._place)

    def must_be_traced(self) -> None:
        """Keeps the trace from ending before this call: behind its end it would be refused."""
        self.changed_at = math.inf
        self._traced_up_to = self._place

    def note_node(self, node: int) -> None:
        """Records a node of the step function's own code."""
        self._places[node] = self._place

    def note_change(self, values: Iterable[int]) -> None:
        """Records a change in place by the step function's own code."""
        self.changed_at = min(self.changed_at, self._place)
        for value in values:
            # Its other names were made before, and would not change with it on other ranks.
            _, *views = self._values.in_memory(self._values.memory_of(value))
            self.changed_at = min(self.changed_at, self._first_made(views))

    def note_seen(self, result: Any) -> None:
        """Records the tensors that the step function's own code gets."""
        self.seen += [item for item in leaves(result) if self._values.find(item) is not None]

    def end(self, left: Collection[DeferredTensor]) -> TraceEnd:
        """The end of the trace, and the place where it should have ended."""
        return TraceEnd(at=self.at, line=self.line, read_at=self.read_at, wanted=self._wanted(left))

    def _wanted(self, left: Collection[DeferredTensor]) -> float:
        """The place at which the trace should have ended; infinite where it need not."""
        values = (self._values.find(item) for item in left)
        end = min(self.at, self._first_made(value for value in values if value is not None))
        return min(end, self.changed_at) if math.isfinite(end) else end

    def _first_made(self, values: Iterable[int]) -> float:
        """The first place where code of the step function has made one of some values; infinite for none."""
        made = (self._places.get(self._values[value].producer, math.inf) for value in values)
        return min((place for place in made if place >= self._traced_up_to), default=math.inf)


class Recording:
    """Collects the facts of a trace while the step function runs.

    Attributes:
        hidden: what units use without having been given it.
        samples: cost class -> arguments of its first call.
        is_counting: a call runs to be counted, and not because the step function makes it.
        num_hooks: hooks that counting has registered, which are none of the step function's.
        python_draws: random numbers of Python and NumPy.
        repeated_buffers: buffers that ``torch.utils.checkpoint`` changes a second time.
        batch_norms: units that compute statistics of a batch, and lines between units that do.
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
        self.samples: dict[str, Sample] = {}
        self.is_counting = False
        self.num_hooks = 0
        self._request = request
        self.python_draws = DrawsOfPython(lambda: recorder.position)
        self.draws = TracedDraws(request.device, user_line)
        self.path = PathRecorder(batch)
        self.repeated_buffers: set[str] = set()
        self.batch_norms: dict[str, None] = {}

    def tensor_facts(self, shapes_asked: Iterable[int]) -> TensorFacts:
        """Facts about the tensors behind the values."""
        orders = {index: order_of(value.fake) for index, value in enumerate(self.values)}
        return TensorFacts(
            memory=tuple(storage_key(value.fake) for value in self.values),
            orders={index: order for index, order in orders.items() if order is not None},
            initial=self.buffers.initial,
            stand_ins=self.values.stand_ins(),
            shapes_asked=frozenset(shapes_asked),
        )

    def random_use(self) -> RandomUse:
        return RandomUse(
            python_at=tuple(self.python_draws.places),
            python_in_units=self.python_draws.in_units,
            set_at=self.draws.set_at,
        )

    def cost_class(self, call: TracedCall, kind: str, kept: list[Any] | None = None) -> str:
        """The cost class of a call, whose arguments are kept if it is the first."""
        # What comes from the batch takes no memory when it is kept, unlike what another call made.
        from_batch = [at for at, item in enumerate(call.items) if self._is_somebody_elses(item)]
        # What is cast computes in another type than its arguments have.
        autocast = autocast_state()
        casts = [f"{device} {dtype}" for device, enabled, dtype in autocast if enabled]
        noted = " ".join(str(part) for part in (from_batch, casts) if part)
        if isinstance(call.func, nn.Module):
            self._request.hooks.note_call(call.func)
        key = cost_class(call.func, f"{kind} {noted}" if noted else kind, call.fakes)
        if key not in self.samples:
            arguments = call.fakes if kept is None else kept
            structure = call.structure.without_template()
            self.samples[key] = Sample(call.func, arguments, structure, autocast, self._request.hooks)
        return key

    def working_memory(self, key: str, call: TracedCall) -> WorkingMemory:
        """The temporary memory of a cost class; counted for the first of its calls."""
        # A gradient leads back through what ran before, where recomputation would call units once more.
        known = self._request.memory
        if known is None or call.func is torch.autograd.grad:
            return WorkingMemory()
        if key not in known:
            given: Sequence[bool] = [self._is_somebody_elses(item) for item in call.items]
            before = num_hooks_registered()
            self.is_counting = True
            try:
                with self.draws.apart(), self.values.fake_mode:
                    known[key] = working_memory(
                        call.func,
                        call.fakes,
                        call.structure,
                        given=given,
                        watch=self.hidden,
                        hooks=self._request.hooks,
                    )
            finally:
                self.is_counting = False
            self.num_hooks += num_hooks_registered() - before
        return known[key]

    def _is_somebody_elses(self, item: Any) -> bool:
        """Whether a leaf is a tensor that no node made: the batch's, or a parameter."""
        return isinstance(item, Tensor) and self.values.find(item) is None

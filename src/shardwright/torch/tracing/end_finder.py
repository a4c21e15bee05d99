"""Finds the end of a trace whose step function may read values of tensors (a `ReadingStep`)."""

import math
from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor

from shardwright.torch.interception.deferred import DeferredTensor
from shardwright.torch.interception.step_code import TraceEnds, in_step_code
from shardwright.torch.pytorch.source_line import user_line
from shardwright.torch.pytorch.tree import leaves
from shardwright.torch.tracing.trace_data import TraceEnd
from shardwright.torch.tracing.trace_recorder import TraceRecorder
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["EndFinder"]


class EndFinder:
    """Finds the end while the step function runs, and leaves it there.

    Places are numbers of nodes so far, and a quarter more behind ``backward``: the same on all ranks. A trace
    ends where the step function reads a value. It has to end earlier, and is made again, where

    - another rank ends its own earlier;
    - the step function changes tensors in place, of which other ranks would have the content of before;
    - it makes what it leaves in a variable of the script, which must hold a tensor on every rank.

    But never before what only a trace can cover: units, parameters, random numbers.

    Args:
        values: the values of the graph.
        recorder: knows how many nodes there are.
        at: the place at which it is left; infinite for the first read.
        may_read: it is left behind its backward, or at its end, if it has read nothing before.

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
        """Leaves the step function at its end.

        Args:
            reads: its code reads a value now.

        Raises:
            TraceEnds: this is the end.
        """
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
        """Records a node of the step function's own code.

        Args:
            node: its number.
        """
        self._places[node] = self._place

    def note_change(self, values: Iterable[int]) -> None:
        """Records a change in place by the step function's own code.

        Args:
            values: those of them that are values of the graph.
        """
        self.changed_at = min(self.changed_at, self._place)
        for value in values:
            # Its other names were made before, and would not change with it on other ranks.
            _, *views = self._values.in_memory(self._values.memory_of(value))
            self.changed_at = min(self.changed_at, self._first_made(views))

    def note_seen(self, result: Any) -> None:
        """Records the tensors that the step function's own code gets."""
        self.seen += [item for item in leaves(result) if self._values.find(item) is not None]

    def end(self, left: Collection[DeferredTensor]) -> TraceEnd:
        """The end of the trace, and the place where it should have ended.

        Args:
            left: what is in variables of the script. What was made before that which must be traced stays a
                stand-in.
        """
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

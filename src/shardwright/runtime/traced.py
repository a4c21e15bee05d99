"""The steps of a traced step function: what each reads, makes and changes in place.

A front end records them while it traces; `dataflow` and `crossings` read them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from shardwright.model_graph import ModelGraph


@dataclass(frozen=True, slots=True)
class View:
    """The place of a tensor in memory, in elements.

    Attributes:
        stride: elements from one entry to the next, by dim.
    """

    memory: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: Any

    @property
    def order(self) -> tuple[int, ...] | None:
        """Its dims from the widest stride to the narrowest; None where it leaves holes in memory."""
        order = sorted(range(len(self.size)), key=lambda dim: (-self.stride[dim], self.size[dim] == 1))
        expected = 1
        for dim in reversed(order):
            if self.size[dim] != 1 and self.stride[dim] != expected:
                return None
            expected *= self.size[dim]
        return tuple(order)

    @property
    def end(self) -> int:
        """The element behind its last."""
        if 0 in self.size:
            return self.offset
        steps = zip(self.size, self.stride, strict=True)
        return self.offset + 1 + sum((size - 1) * stride for size, stride in steps)

    def covers(self, other: "View") -> bool:
        """Whether the other tensor is a view of this one."""
        inside = self.offset <= other.offset and other.end <= self.end
        return inside and self.order is not None and self.dtype == other.dtype


@dataclass(frozen=True, slots=True)
class Change:
    """A tensor that a step changes in place, or one that shares memory with such a tensor.

    Attributes:
        position: among the leaves of the arguments; None for a tensor that the step is not given.
        before: its value before; None for a tensor that every rank has.
        lasting: it was there before the step function was called, and will be there afterwards.
    """

    position: int | None
    before: int | None
    after: int
    view: View
    lasting: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorFacts:
    """Facts about the tensors behind a graph's values, besides shape and type.

    Attributes:
        memory: of each value: equal for those that share memory.
        orders: value -> the order of its dims in memory, where that is not their own.
        initial: value -> name of the buffer of which it is the content at the start.
        stand_ins: of each value, the one that its stand-in names on other ranks: after a change in place,
            that of before. None where every rank has a tensor of its own.
        shapes_asked: values whose shape Python asks for between units.
    """

    memory: tuple[int, ...]
    orders: Mapping[int, tuple[int, ...]]
    initial: Mapping[int, str]
    stand_ins: tuple[int | None, ...]
    shapes_asked: frozenset[int]


class TracedStep(Protocol):
    """One intercepted operation or unit call.

    Attributes:
        node: index of its node in the graph; None for an operation that every rank executes.
        reads: (position among the leaves of the arguments, value) of each value that it reads.
        writes: (position among the leaves of the result, value).
        changes: what it changes in place, and what shares memory with that and is read later.
        bases: for each memory of which several tensors change, the one that the others are views of.
        shared_results: positions of results in memory of the unit's own that are changed afterwards.
    """

    @property
    def node(self) -> int | None: ...
    @property
    def line(self) -> str: ...
    @property
    def looks_at_values(self) -> bool: ...
    @property
    def reads(self) -> Sequence[tuple[int, int]]: ...
    @property
    def writes(self) -> Sequence[tuple[int, int]]: ...
    @property
    def changes(self) -> Sequence[Change]: ...
    @property
    def bases(self) -> Sequence[Change]: ...
    @property
    def shared_results(self) -> Sequence[int]: ...


class TracedFunction(Protocol):
    """A step function, traced on one microbatch.

    Attributes:
        graph: the nodes that are placed on stages.
        steps: everything that was intercepted, in the order of execution.
    """

    @property
    def graph(self) -> ModelGraph: ...
    @property
    def steps(self) -> Sequence[TracedStep]: ...
    @property
    def tensors(self) -> TensorFacts: ...

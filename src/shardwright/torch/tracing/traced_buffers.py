"""Buffers outside of units while a step function is traced (see `shardwright.torch.tracing.glue_buffers`)."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.model_graph import Node, Together
from shardwright.torch._private import storage_key
from shardwright.torch.tracing.glue_buffers import BufferWatch
from shardwright.torch.tracing.recorded_step import Step
from shardwright.torch.tracing.together import buffer_together
from shardwright.torch.tracing.traced_values import TracedValues

__all__ = ["TracedBuffers"]


class TracedBuffers:
    """Changed buffers: values of the graph, or counters that every rank keeps for itself.

    Args:
        values: of the trace.
        buffers: outside of units, by first name.
        state: names of those whose content is a value of the graph.
        counters: names of those that every rank changes.

    Attributes:
        initial: value -> name of the buffer of which it is the content at the start.
    """

    def __init__(
        self,
        values: TracedValues,
        buffers: Mapping[str, Tensor],
        state: Collection[str],
        counters: Collection[str],
    ):
        self.initial: dict[int, str] = {}
        self._values = values
        self._state = {id(buffer): name for name, buffer in buffers.items() if name in state}
        self._counters = {storage_key(buffer): name for name, buffer in buffers.items() if name in counters}

    def first_read(self, item: Tensor, node: int) -> int | None:
        """The content of a buffer at the start; None for another tensor.

        Args:
            item: a tensor that is no value yet.
            node: that reads it, and counts as its producer.
        """
        name = self._state.get(id(item))
        if name is None:
            return None
        value = self._values.new(node, -1, self._values.as_fake(item), holder=item)
        self.initial[value] = name
        return value

    def counters_among(self, items: Sequence[Any]) -> tuple[str, ...]:
        """Names of the counters among the leaves of arguments."""
        if not self._counters:
            return ()
        real = [item for item in items if type(item) is Tensor and item.layout is torch.strided]
        found = (self._counters.get(storage_key(item)) for item in real)
        return tuple(dict.fromkeys(name for name in found if name is not None))

    def together(self, steps: Sequence[Step], nodes: Sequence[Node], watch: BufferWatch) -> list[Together]:
        """Nodes that read and change one buffer."""
        found = []
        for value, name in self.initial.items():
            memory = self._values.memory_of(value)
            readers = {s.node for s in steps if s.node is not None and value in s.inputs}
            writers = {
                s.node
                for s in steps
                if s.node is not None and any(c.view.memory == memory for c in s.changes)
            }
            last = self._values.find(watch.last(name))
            if last is not None and last != value:
                writers.add(self._values[last].producer)
            found.append(buffer_together(name, nodes, readers, writers))
        return found

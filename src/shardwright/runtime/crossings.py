"""Finds the values that one stage makes and another reads."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.model_graph import TensorSpec
from shardwright.runtime.dataflow import Dataflow


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage makes and another reads.

    Attributes:
        detached: none does, as the units that read it gave none in the trace.
        order: of its dims in memory, where that is not their own; of its gradient's, too.
        part: sizes of what this rank has of it, where ranks share a batch; None: all.
    """

    value: int
    source: int
    target: int
    spec: TensorSpec
    has_gradient: bool
    detached: bool = False
    order: tuple[int, ...] | None = None
    part: tuple[int, ...] | None = None

    @property
    def message_shape(self) -> tuple[int, ...]:
        """The sizes of what is sent, in the order of memory, in which it is sent."""
        shape = self.spec.shape if self.part is None else self.part
        return shape if self.order is None else tuple(shape[dim] for dim in self.order)


Crossings = Mapping[tuple[int, int], tuple[Crossing, ...]]
"""(source, target) -> what goes from the one stage to the other, by ascending value; pairs ascend, too."""

PartOf = Callable[[tuple[int, ...]], tuple[int, ...] | None]


def crossings_of(dataflow: Dataflow, *, part_of: PartOf | None = None) -> Crossings:
    """The values sent from stage to stage."""
    graph, homes = dataflow.trace.graph, dataflow.homes
    found: dict[tuple[int, int], dict[int, Crossing]] = {}
    contributes = graph.contributing()
    for value, reader in dataflow.crossings:
        source, target = dataflow.home_of[value], homes[reader]
        spec = graph.values[value].spec
        pair = found.setdefault((source, target), {})
        gradient = spec.requires_grad and graph.loss is not None and reader in contributes
        detached = value in graph.nodes[reader].detached
        before = pair.get(value)
        has_gradient = (before is not None and before.has_gradient) or (gradient and not detached)
        pair[value] = Crossing(
            value,
            source,
            target,
            spec,
            has_gradient,
            detached=not has_gradient and gradient and detached,
            order=dataflow.trace.tensors.orders.get(value),
            part=None if part_of is None else part_of(spec.shape),
        )
    return {pair: tuple(group[value] for value in sorted(group)) for pair, group in sorted(found.items())}


def gradients_of(crossings: Crossings) -> Crossings:
    """The gradients sent back, each in the form of its value: (reader, maker) -> values."""
    back = {
        (target, source): tuple(crossing for crossing in group if crossing.has_gradient)
        for (source, target), group in crossings.items()
    }
    return {pair: group for pair, group in back.items() if group}

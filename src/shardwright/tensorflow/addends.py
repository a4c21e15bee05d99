"""Takes gradients apart that several stages have a part in, as that of a tied embedding.

::

    stage 0   gradient of the lookup ─┐
                                      ├─ AddN ─▶ returned
    stage 1   gradient of the head  ──┘

Each stage sums its own part over the microbatches, and one message a batch brings the sums together.
Otherwise a gradient as large as the embedding would go to the first stage in each microbatch.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.tensorflow.step_graph import Operation, StepGraph

_ADDITIONS = frozenset(("AddN", "AddV2", "Add"))


@dataclass(frozen=True, slots=True)
class Addends:
    """Gradients that are sums of what different stages make.

    Attributes:
        parts: output of the step -> the tensors whose sum it is.
        left_out: names of the operations that would have added them up, which no stage runs.
    """

    parts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    left_out: frozenset[str] = frozenset()


def taken_apart(graph: StepGraph, stages: Mapping[str, int], owners: Mapping[int, int]) -> Addends:
    """The gradients that other stages than the variable's have a part in."""
    return _Search(graph, stages, owners).found()


class _Search:
    def __init__(self, graph: StepGraph, stages: Mapping[str, int], owners: Mapping[int, int]):
        self._graph = graph
        self._stages = stages
        self._owners = owners
        self._makers = graph.makers()
        self._reads = Counter(tensor for operation in graph.operations for tensor in operation.inputs)
        self._reads.update(graph.outputs)
        self._waited_for = {name for operation in graph.operations for name in operation.controls}

    def found(self) -> Addends:
        parts: dict[str, tuple[str, ...]] = {}
        left_out: set[str] = set()
        for position in sorted(self._graph.sums):
            name = self._graph.outputs[position]
            additions, leaves = self._sum_behind(name)
            makers = {self._makers[leaf].name for leaf in leaves}
            if len(leaves) < 2 or not makers <= self._stages.keys():
                continue
            owner = self._owners.get(self._graph.gradients[name])
            if any(self._stages[maker] != owner for maker in makers):
                parts[name] = tuple(leaves)
                left_out |= additions
        return Addends(parts, frozenset(left_out))

    def _sum_behind(self, output: str) -> tuple[set[str], list[str]]:
        """The operations that do nothing but add up for this output, and what they add."""
        additions: set[str] = set()
        leaves: list[str] = []
        pending = [output]
        while pending:
            tensor = pending.pop()
            operation = self._makers[tensor]
            if self._reads[tensor] == 1 and self._only_adds(operation):
                additions.add(operation.name)
                pending.extend(reversed(operation.inputs))
            else:
                leaves.append(tensor)
        return additions, leaves

    def _only_adds(self, operation: Operation) -> bool:
        if operation.name in self._waited_for or operation.name not in self._stages:
            return False
        if operation.kind == "Identity":
            return True
        specs = self._graph.specs
        shapes = {specs[tensor].shape for tensor in (*operation.inputs, *operation.outputs)}
        return operation.kind in _ADDITIONS and len(shapes) == 1

"""Any traced model as a chain of layers, for the search."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.catalogue import Layer, LayerChain
from shardwright.errors import UsageError
from shardwright.model_graph import ModelGraph, Node

__all__ = ["chain_of"]

_BITS_16 = frozenset({"float16", "bfloat16"})


@dataclass(slots=True)
class _Sums:
    """What a layer gathers of the nodes that belong to it."""

    parameters: int = 0
    flops: float = 0.0
    moved: float = 0.0
    kept: float = 0.0
    inputs: set[int] = field(default_factory=set)


def chain_of(graph: ModelGraph, *, name: str) -> LayerChain:
    """The chain of a model's unit calls, each with the operations that follow it.

    Numbers of a sample are those of a microbatch divided by its samples: what does not depend on the batch (a
    mask) is counted a little too often.

    Args:
        graph: the traced model.
        name: for display.

    Raises:
        UsageError: it calls no unit.
    """
    calls = graph.calls
    if not calls:
        raise UsageError(f"{name} calls no module, so there is nothing to divide. Name a model with layers.")
    samples = max(graph.batch_size, 1)
    width = _width(graph)
    homes = _homes(graph)
    sums = [_Sums() for _ in calls]
    seen: set[str] = set()
    saved: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if not node.free:
            _add(sums[homes[index]], graph, node, seen, saved)
    crossing = _crossing(graph, homes, len(calls))
    per_sample = 1.0 / (samples * width)
    layers = []
    for number, (call, of_layer) in enumerate(zip(calls, sums, strict=True)):
        inputs = sum(graph.values[value].spec.num_bytes for value in of_layer.inputs)
        layers.append(
            Layer(
                name=graph.nodes[call].label,
                parameters=of_layer.parameters,
                flops=of_layer.flops / samples,
                moved=of_layer.moved * per_sample,
                kept=of_layer.kept * per_sample,
                inputs=inputs * per_sample,
                crossing=crossing[number] * per_sample,
            )
        )
    return LayerChain(name=name, layers=tuple(layers), source="traced")


def _add(of_layer: _Sums, graph: ModelGraph, node: Node, seen: set[str], saved: set[int]) -> None:
    own = graph.units[node.name].parameters if node.kind == "unit" else ()
    for parameter in (*own, *node.parameters):
        spec = graph.parameters[parameter]
        if parameter not in seen and not spec.is_buffer:
            seen.add(parameter)
            of_layer.parameters += _elements(spec.spec.shape)
    of_layer.flops += node.flops
    touched = {*node.inputs, *node.outputs}
    of_layer.moved += sum(graph.values[value].spec.num_bytes for value in touched)
    # A value that several nodes keep is there once.
    again = [value for value in node.saved_values if value in saved]
    of_layer.kept += max(0, node.saved_bytes - sum(graph.values[value].spec.num_bytes for value in again))
    saved.update(node.saved_values)
    if node.kind == "unit":
        of_layer.inputs.update(node.inputs)


def _homes(graph: ModelGraph) -> list[int]:
    """The layer of each node: operations belong to the last call before them."""
    homes, number = [], -1
    for node in graph.nodes:
        number += node.kind == "unit"
        homes.append(max(number, 0))
    return homes


def _crossing(graph: ModelGraph, homes: list[int], layers: int) -> list[int]:
    """Bytes of values that are made up to each layer and read behind it."""
    readers: Mapping[int, Iterable[int]] = dict(enumerate(graph.consumers()))
    change = [0] * (layers + 1)
    for index, value in enumerate(graph.values):
        if value.free:
            continue
        first = homes[value.producer]
        last = max((homes[reader] for reader in readers.get(index, ())), default=first)
        if last > first:
            change[first] += value.spec.num_bytes
            change[last] -= value.spec.num_bytes
    found, now = [], 0
    for each in change[:layers]:
        now += each
        found.append(now)
    return found


def _width(graph: ModelGraph) -> int:
    """Bytes of a number: of most parameters."""
    narrow = wide = 0
    for parameter in graph.parameters.values():
        size = _elements(parameter.spec.shape)
        if parameter.spec.dtype in _BITS_16:
            narrow += size
        else:
            wide += size
    return 2 if narrow > wide else 4


def _elements(shape: tuple[int, ...]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found

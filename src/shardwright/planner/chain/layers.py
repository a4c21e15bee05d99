"""Any traced model as a chain of layers, for the search."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shardwright.catalogue import Layer, LayerChain
from shardwright.errors import UsageError
from shardwright.model_graph import ModelGraph, Node
from shardwright.planner.chain.division import Division
from shardwright.work import Work

__all__ = ["chain_of"]

_BITS_16 = frozenset({"float16", "bfloat16"})


@dataclass(slots=True)
class _Sums:
    """The sums of the nodes of one layer."""

    parameters: int = 0
    work: Work = field(default_factory=Work)
    kept: float = 0.0
    inputs: set[int] = field(default_factory=set)


def chain_of(graph: ModelGraph, *, name: str, division: Division | None = None) -> LayerChain:
    """The chain of a model's unit calls, each with the operations that follow it.

    Numbers of a sample are those of a microbatch divided by its samples: what does not depend on the batch (a
    mask) is counted a little too often.
    """
    calls = graph.calls
    if not calls:
        raise UsageError(f"{name} calls no module, so there is nothing to divide. Name a model with layers.")
    samples = max(graph.batch_size, 1)
    width = _width(graph)
    homes = [0 if home is None else home for home in graph.home_calls()]
    sums = [_Sums() for _ in calls]
    seen: set[str] = set()
    saved: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if not node.free:
            _add(sums[homes[index]], graph, index, seen, saved, division)
    crossing = _crossing(graph, homes, len(calls), division)
    per_sample = 1.0 / (samples * width)
    layers = []
    for number, (call, of_layer) in enumerate(zip(calls, sums, strict=True)):
        inputs = sum(_bytes_of(graph, value, division) for value in of_layer.inputs)
        name_of_unit = graph.nodes[call].name
        layers.append(
            Layer(
                name=graph.nodes[call].label,
                parameters=of_layer.parameters,
                flops=of_layer.work.product_flops / samples,
                attention=of_layer.work.attention_flops / samples,
                products=of_layer.work.products,
                kernels=of_layer.work.kernels,
                moved=of_layer.work.moved_bytes * per_sample,
                # Half of the weights is in it, which a chain counts once a microbatch.
                product_moved=max(
                    0.0, of_layer.work.product_bytes * per_sample - of_layer.parameters / 2 / samples
                ),
                kept=of_layer.kept * per_sample,
                inputs=inputs * per_sample,
                crossing=crossing[number] * per_sample,
                collectives=0 if division is None else division.collectives(name_of_unit),
                dispatch_s=0.0 if division is None else division.dispatch_s(name_of_unit),
                sent=0.0
                if division is None
                else division.sent_bytes(name_of_unit, graph.batch_size) * per_sample,
            )
        )
    return LayerChain(name=name, layers=tuple(layers), source="traced")


def _add(
    of_layer: _Sums,
    graph: ModelGraph,
    index: int,
    seen: set[str],
    saved: set[int],
    division: Division | None,
) -> None:
    node = graph.nodes[index]
    own = graph.units[node.name].parameters if node.kind == "unit" else ()
    for parameter in (*own, *node.parameters):
        spec = graph.parameters[parameter]
        if parameter not in seen and not spec.is_buffer:
            seen.add(parameter)
            elements = _elements(spec.spec.shape)
            of_layer.parameters += elements if division is None else division.held(parameter, elements)
    work = _work_around(graph, node) if node.work is None else node.work
    share = kept_share = 1.0
    if division is not None and node.kind == "op":
        share = kept_share = division.share_of_operation(index)
    elif division is not None:
        share, kept_share = division.shares(node.name)
    of_layer.work += work.of_size(share)
    # A value that several nodes keep is there once.
    again = [value for value in node.saved_values if value in saved]
    kept = node.saved_bytes * kept_share
    of_layer.kept += max(0.0, kept - sum(_bytes_of(graph, value, division) for value in again))
    saved.update(node.saved_values)
    if node.kind == "unit":
        of_layer.inputs.update(node.inputs)


def _bytes_of(graph: ModelGraph, value: int, division: Division | None) -> int:
    spec = graph.values[value].spec
    return spec.num_bytes if division is None else division.between_bytes(value, spec)


def _work_around(graph: ModelGraph, node: Node) -> Work:
    """The work of a node with known FLOPs alone: it reads its inputs and writes its outputs."""
    touched = sum(graph.values[value].spec.num_bytes for value in {*node.inputs, *node.outputs})
    return Work(products=1, product_flops=node.flops, kernels=3, moved_bytes=touched)


def _crossing(graph: ModelGraph, homes: list[int], layers: int, division: Division | None) -> list[int]:
    """Bytes of values that are made up to each layer and read behind it."""
    readers: Mapping[int, Iterable[int]] = dict(enumerate(graph.consumers()))
    change = [0] * (layers + 1)
    for index, value in enumerate(graph.values):
        if value.free:
            continue
        first = homes[value.producer]
        last = max((homes[reader] for reader in readers.get(index, ())), default=first)
        if last > first:
            num_bytes = _bytes_of(graph, index, division)
            change[first] += num_bytes
            change[last] -= num_bytes
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

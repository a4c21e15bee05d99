"""Makes the chain of a traced model.

Operations between calls have a home too (`ModelGraph.home_calls`). So every value has one home, and crosses
to the calls that read it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from shardwright.catalogue import Layer, LayerChain
from shardwright.errors import PlanError, UsageError
from shardwright.model_graph import ModelGraph, Node, Work
from shardwright.planner.chain import (
    CallCost,
    Chain,
    Flow,
    ParameterUse,
    SavedValue,
    bonds_of_groups,
    bonds_of_units,
)
from shardwright.planner.division import UNDIVIDED, Division
from shardwright.profile import Cost, Profile, UnitCost


def build_chain(graph: ModelGraph, profile: Profile, division: Division | None = None) -> Chain:
    calls = graph.calls
    if not calls:
        raise PlanError(
            "the step function calls no module inside the model, so there is nothing to place on stages. "
            "Call the model in the step function, and the modules inside as layer(x): layer.forward(x) is "
            "not seen. A model of one layer cannot be cut: make each rank a replica with "
            'sw.init({"pipeline_parallel_degree": 1}), or start one rank.'
        )
    nodes = [graph.nodes[call] for call in calls]
    _check(nodes, profile)
    division = division or UNDIVIDED
    profile = division.profile(graph, profile)
    costs = [profile.costs[node.cost_class] for node in nodes]
    homes = graph.home_calls()
    chain = Chain(
        labels=tuple(node.label for node in nodes),
        starts=tuple(range(len(calls) + 1)),
        costs=_with_exchange(
            _with_operations(graph, homes, costs, profile, division), graph, homes, division
        ),
        flows=_flows(graph, homes, division),
        parameters=_parameter_uses(graph, homes, division),
        provenance="measured" if all(cost.provenance == "measured" for cost in costs) else "estimated",
        saved_values=_saved_values(graph, homes, division),
        batch_bytes=graph.batch_bytes,
        bonds=(*bonds_of_units(graph), *bonds_of_groups(graph, homes)),
        operations=graph.operations,
    )
    return chain.bound(stages_per_rank=1)


def _check(nodes: Sequence[Node], profile: Profile) -> None:
    missing = sorted({node.cost_class for node in nodes} - set(profile.costs))
    if missing:
        label = next(node.label for node in nodes if node.cost_class == missing[0])
        raise PlanError(
            f"the profile has {len(profile.costs)} cost classes but lacks {len(missing)} of the model's, "
            f"for example that of unit {label}. Profile the model anew."
        )


def _with_exchange(
    costs: tuple[CallCost, ...], graph: ModelGraph, homes: Sequence[int | None], division: Division
) -> tuple[CallCost, ...]:
    """The costs of calls with what they, and the operations at home with them, exchange."""
    found = []
    for cost, node in zip(costs, (graph.nodes[call] for call in graph.calls), strict=True):
        forward_s, backward_s, num_bytes = division.exchange_of(division.unit(node.name), graph.batch_size)
        found.append(
            replace(
                cost,
                forward_exchange_s=forward_s,
                backward_exchange_s=backward_s,
                exchange_bytes=num_bytes,
                settling_s=0.0 if node.ordinal else division.settling_s(node.name),
            )
        )
    for number, home in enumerate(homes):
        operation = division.operations.get(number)
        if home is None or operation is None or graph.nodes[number].kind == "unit":
            continue
        before = found[home]
        forward_s, backward_s, num_bytes = division.exchange_of(operation, graph.batch_size)
        found[home] = replace(
            before,
            forward_exchange_s=before.forward_exchange_s + forward_s,
            backward_exchange_s=before.backward_exchange_s + backward_s,
            exchange_bytes=before.exchange_bytes + num_bytes,
        )
    return tuple(found)


def _with_operations(
    graph: ModelGraph,
    homes: Sequence[int | None],
    costs: Sequence[UnitCost],
    profile: Profile,
    division: Division,
) -> tuple[CallCost, ...]:
    """The costs of calls with those of the operations whose homes they are."""
    totals: list[Cost] = list(costs)
    glue_bytes, gradient_bytes = [0] * len(costs), [0] * len(costs)
    for number, (node, home) in enumerate(zip(graph.nodes, homes, strict=True)):
        if home is None:
            continue
        share = division.share_of_operation(number)
        # While a node's backward runs, the gradients of its results and of its inputs are there.
        around = (value for value in (*node.inputs, *node.outputs) if graph.values[value].spec.requires_grad)
        gradients = sum(_bytes_of(graph, value, division) for value in around)
        gradient_bytes[home] = max(gradient_bytes[home], gradients, round(node.work_bytes * share))
        if node.kind == "op":
            glue_bytes[home] += round(node.saved_bytes * share)
            cost = profile.costs.get(node.cost_class)
            if cost is not None:
                # The runtime puts off the gradients of units' weights alone.
                totals[home] += Cost(cost.forward_s * share, cost.backward_s * share)
    rows = zip(costs, totals, glue_bytes, gradient_bytes, strict=True)
    return tuple(_call_cost(*row) for row in rows)


def _call_cost(unit: UnitCost, total: Cost, glue_bytes: int, gradient_bytes: int) -> CallCost:
    split_work_bytes = unit.work_bytes if unit.split_work_bytes is None else unit.split_work_bytes
    return CallCost(
        forward_s=total.forward_s,
        backward_s=total.backward_s,
        weight_s=total.weight_s,
        input_s=max(total.rest_s, 0.0),
        saved_bytes=unit.saved_bytes,
        weight_bytes=unit.weight_bytes,
        recompute_s=unit.forward_s,
        kept_bytes=min(unit.input_bytes, unit.saved_bytes),
        glue_bytes=glue_bytes,
        work_bytes=max(unit.work_bytes, gradient_bytes),
        split_work_bytes=max(split_work_bytes, gradient_bytes),
    )


def _bytes_of(graph: ModelGraph, value: int, division: Division) -> int:
    """Bytes of a tensor between units, on a rank."""
    return division.between_bytes(value, graph.values[value].spec)


def _flows(graph: ModelGraph, homes: Sequence[int | None], division: Division) -> tuple[Flow, ...]:
    contributing = graph.contributing()
    consumers = graph.consumers()
    flows = []
    for index, value in enumerate(graph.values):
        source = homes[value.producer]
        if source is None or value.free:
            continue
        targets: set[int] = set()
        gradient_targets: set[int] = set()
        for reader in consumers[index]:
            target = homes[reader]
            if target is not None and target > source:
                targets.add(target)
                detached = index in graph.nodes[reader].detached
                if value.spec.requires_grad and reader in contributing and not detached:
                    gradient_targets.add(target)
        if targets:
            num_bytes = _bytes_of(graph, index, division)
            flows.append(
                Flow(
                    source=source,
                    targets=tuple(sorted(targets)),
                    num_bytes=num_bytes,
                    gradient_bytes=num_bytes if gradient_targets else 0,
                    gradient_targets=tuple(sorted(gradient_targets)),
                )
            )
    return tuple(flows)


def _saved_values(
    graph: ModelGraph, homes: Sequence[int | None], division: Division
) -> tuple[SavedValue, ...]:
    savers: dict[int, list[int]] = {}
    glue_savers: dict[int, list[int]] = {}
    for node, home in zip(graph.nodes, homes, strict=True):
        for kept in node.saved_values:
            if home is not None:
                (savers if node.kind == "unit" else glue_savers).setdefault(kept, []).append(home)
    contributing, consumers = graph.contributing(), graph.consumers()
    home_of = {node: home for node, home in enumerate(homes) if home is not None}
    found = []
    for index, value in enumerate(graph.values):
        source = homes[value.producer]
        readers = [reader for reader in consumers[index] if reader in home_of]
        if source is None or value.free or not readers:
            continue
        returning = [
            home_of[reader]
            for reader in readers
            if value.spec.requires_grad
            and reader in contributing
            and index not in graph.nodes[reader].detached
        ]
        found.append(
            SavedValue(
                source=source,
                num_bytes=_bytes_of(graph, index, division),
                savers=tuple(savers.get(index, ())),
                glue_savers=tuple(glue_savers.get(index, ())),
                readers=tuple(home_of[r] for r in readers if graph.nodes[r].kind == "unit"),
                takers=tuple(dict.fromkeys(home_of[r] for r in readers)),
                sent=max(returning, default=-1),
            )
        )
    return tuple(found)


def _parameter_uses(
    graph: ModelGraph, homes: Sequence[int | None], division: Division
) -> tuple[ParameterUse, ...]:
    uses: dict[str, set[int]] = {}
    for node, home in zip(graph.nodes, homes, strict=True):
        own = graph.units[node.name].parameters if node.kind == "unit" else ()
        for name in (*own, *node.parameters):
            if home is not None:
                uses.setdefault(name, set()).add(home)
    return tuple(
        ParameterUse(
            name=name,
            num_bytes=division.held(name, parameter.spec.num_bytes),
            trained=parameter.spec.requires_grad and not parameter.is_buffer,
            calls=tuple(sorted(uses[name])),
            num_elements=division.held(name, prod(parameter.spec.shape)),
            is_buffer=parameter.is_buffer,
        )
        for name, parameter in graph.parameters.items()
        if name in uses
    )


_BITS_16 = frozenset({"float16", "bfloat16"})


@dataclass(slots=True)
class _Sums:
    """The sums of the nodes of one layer."""

    parameters: float = 0
    frozen: float = 0
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
    division = division or UNDIVIDED
    samples = max(graph.batch_size, 1)
    width = _width(graph)
    homes = [0 if home is None else home for home in graph.home_calls()]
    sums = [_Sums() for _ in calls]
    seen: set[str] = set()
    saved: set[int] = set()
    for index, node in enumerate(graph.nodes):
        if not node.free:
            _add(sums[homes[index]], graph, index, seen, saved, division, width)
    crossing = _crossing(graph, homes, len(calls), division)
    per_sample = 1.0 / (samples * width)
    layers = []
    for number, (call, of_layer) in enumerate(zip(calls, sums, strict=True)):
        inputs = sum(_bytes_of(graph, value, division) for value in of_layer.inputs)
        unit = graph.nodes[call].name
        _, _, sent = division.exchange_of(division.unit(unit), graph.batch_size)
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
                collectives=division.collectives(unit),
                dispatch_s=division.dispatch_s(unit),
                frozen=of_layer.frozen,
                sent=sent * per_sample,
            )
        )
    return LayerChain(name=name, layers=tuple(layers), source="traced")


def _add(
    of_layer: _Sums,
    graph: ModelGraph,
    index: int,
    seen: set[str],
    saved: set[int],
    division: Division,
    width: int,
) -> None:
    node = graph.nodes[index]
    own = graph.units[node.name].parameters if node.kind == "unit" else ()
    for parameter in (*own, *node.parameters):
        spec = graph.parameters[parameter]
        if parameter not in seen and not spec.is_buffer:
            seen.add(parameter)
            if spec.spec.requires_grad:
                of_layer.parameters += division.held(parameter, prod(spec.spec.shape))
                continue
            frozen = division.held(parameter, spec.spec.num_bytes) / width
            of_layer.parameters += frozen
            of_layer.frozen += frozen
    work = _work_around(graph, node) if node.work is None else node.work
    if node.kind == "op":
        share = kept_share = division.share_of_operation(index)
    else:
        share, kept_share = division.shares(node.name)
    of_layer.work += work.of_size(share)
    # A value that several nodes keep is there once.
    again = [value for value in node.saved_values if value in saved]
    kept = node.saved_bytes * kept_share
    of_layer.kept += max(0.0, kept - sum(_bytes_of(graph, value, division) for value in again))
    saved.update(node.saved_values)
    if node.kind == "unit":
        of_layer.inputs.update(node.inputs)


def _work_around(graph: ModelGraph, node: Node) -> Work:
    """The work of a node with known FLOPs alone: it reads its inputs and writes its outputs."""
    touched = sum(graph.values[value].spec.num_bytes for value in {*node.inputs, *node.outputs})
    return Work(products=1, product_flops=node.flops, kernels=3, moved_bytes=touched)


def _crossing(graph: ModelGraph, homes: list[int], layers: int, division: Division) -> list[int]:
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
        size = prod(parameter.spec.shape)
        if parameter.spec.dtype in _BITS_16:
            narrow += size
        else:
            wide += size
    return 2 if narrow > wide else 4

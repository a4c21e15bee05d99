"""Makes the chain of a traced model.

Operations between calls have a home too (`ModelGraph.home_calls`). So every value has one home, and crosses
to the calls that read it.
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from shardwright.errors import PlanError
from shardwright.model_graph import ModelGraph, Node
from shardwright.planner.chain.bonds import bonds_of_groups, bonds_of_units
from shardwright.planner.chain.chain import CallCost, Chain, Flow, ParameterUse, SavedValue
from shardwright.planner.chain.division import Division
from shardwright.profile import Cost, Profile, UnitCost

__all__ = ["build_chain"]


def build_chain(graph: ModelGraph, profile: Profile, division: Division | None = None) -> Chain:
    """Makes the chain of a traced model."""
    calls = graph.calls
    if not calls:
        raise PlanError(
            "the step function calls no module inside the model, so there is nothing to place on stages. "
            "Call the model in the step function, and the modules inside as layer(x): layer.forward(x) is "
            "not seen. A model of one layer cannot be cut: start one rank for it."
        )
    nodes = [graph.nodes[call] for call in calls]
    _check(nodes, profile)
    if division is not None:
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
    costs: tuple[CallCost, ...], graph: ModelGraph, homes: Sequence[int | None], division: Division | None
) -> tuple[CallCost, ...]:
    """The costs of calls with what they, and the operations at home with them, exchange.

    Gradients of a unit are settled at its first call.
    """
    if division is None:
        return costs
    found = []
    for cost, node in zip(costs, (graph.nodes[call] for call in graph.calls), strict=True):
        forward_s, backward_s = division.exchange_seconds(node.name, graph.batch_size)
        found.append(
            replace(
                cost,
                forward_exchange_s=forward_s,
                backward_exchange_s=backward_s,
                exchange_bytes=division.sent_bytes(node.name, graph.batch_size),
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
    division: Division | None,
) -> tuple[CallCost, ...]:
    """The costs of calls with those of the operations whose homes they are."""
    totals: list[Cost] = list(costs)
    glue_bytes, gradient_bytes = [0] * len(costs), [0] * len(costs)
    for number, (node, home) in enumerate(zip(graph.nodes, homes, strict=True)):
        if home is None:
            continue
        share = 1.0 if division is None else division.share_of_operation(number)
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


def _bytes_of(graph: ModelGraph, value: int, division: Division | None) -> int:
    """Bytes of a tensor between units, on a rank."""
    spec = graph.values[value].spec
    return spec.num_bytes if division is None else division.between_bytes(value, spec)


def _flows(graph: ModelGraph, homes: Sequence[int | None], division: Division | None) -> tuple[Flow, ...]:
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
    graph: ModelGraph, homes: Sequence[int | None], division: Division | None
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
    graph: ModelGraph, homes: Sequence[int | None], division: Division | None
) -> tuple[ParameterUse, ...]:
    def held(name: str, num: int) -> int:
        return num if division is None else division.held(name, num)

    uses: dict[str, set[int]] = {}
    for node, home in zip(graph.nodes, homes, strict=True):
        own = graph.units[node.name].parameters if node.kind == "unit" else ()
        for name in (*own, *node.parameters):
            if home is not None:
                uses.setdefault(name, set()).add(home)
    return tuple(
        ParameterUse(
            name=name,
            num_bytes=held(name, parameter.spec.num_bytes),
            trained=parameter.spec.requires_grad and not parameter.is_buffer,
            calls=tuple(sorted(uses[name])),
            num_elements=held(name, prod(parameter.spec.shape)),
            is_buffer=parameter.is_buffer,
        )
        for name, parameter in graph.parameters.items()
        if name in uses
    )

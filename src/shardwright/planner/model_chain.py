"""Makes the chain of a traced model.

Operations between calls have a home too (`ModelGraph.home_calls`). So every value has one home, and crosses
to the calls that read it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import nan, prod

import numpy as np

from shardwright.errors import PlanError
from shardwright.model_graph import ModelGraph, Node
from shardwright.planner.bonds import bonds_of_groups, bonds_of_units
from shardwright.planner.chain import Chain, Floats, Flow, ParameterUse, SavedValue
from shardwright.profile import Cost, Profile, UnitCost

__all__ = ["build_chain"]


def build_chain(graph: ModelGraph, profile: Profile) -> Chain:
    """Makes the chain of a traced model.

    Raises:
        PlanError: the model calls no unit, or the profile lacks the cost of one.
    """
    calls = graph.calls
    if not calls:
        raise PlanError(
            "the step function calls no module inside the model, so there is nothing to place on stages. "
            "Call the model in the step function, and the modules inside as layer(x): layer.forward(x) is "
            "not seen. A model of one layer cannot be cut: start one rank for it."
        )
    nodes = [graph.nodes[call] for call in calls]
    costs = _costs(nodes, profile)
    homes = graph.home_calls()
    totals, glue = _with_operations(graph, homes, costs, profile)
    work_bytes = np.array([float(cost.work_bytes) for cost in costs])
    split_work_bytes = np.array(
        [float(cost.work_bytes if cost.split_work_bytes is None else cost.split_work_bytes) for cost in costs]
    )
    chain = Chain(
        labels=tuple(node.label for node in nodes),
        starts=tuple(range(len(calls) + 1)),
        forward_s=np.array([total.forward_s for total in totals]),
        backward_s=np.array([total.backward_s for total in totals]),
        input_s=np.array([max(total.rest_s, 0.0) for total in totals]),
        weight_s=np.array([total.weight_s for total in totals]),
        recompute_s=np.array([cost.forward_s for cost in costs]),
        saved_bytes=np.array([float(cost.saved_bytes) for cost in costs]),
        kept_bytes=np.array([float(min(cost.input_bytes, cost.saved_bytes)) for cost in costs]),
        glue_bytes=glue.saved_bytes,
        work_bytes=np.maximum(work_bytes, glue.gradient_bytes),
        flows=_flows(graph, homes),
        parameters=_parameter_uses(graph, homes),
        provenance="measured" if all(cost.provenance == "measured" for cost in costs) else "estimated",
        weight_bytes=np.array([nan if cost.weight_bytes is None else cost.weight_bytes for cost in costs]),
        split_work_bytes=np.maximum(split_work_bytes, glue.gradient_bytes),
        saved_values=_saved_values(graph, homes),
        batch_bytes=graph.batch_bytes,
        bonds=(*bonds_of_units(graph), *bonds_of_groups(graph, homes)),
    )
    return chain.bound(stages_per_rank=1)


def _costs(nodes: Sequence[Node], profile: Profile) -> list[UnitCost]:
    missing = sorted({node.cost_class for node in nodes} - set(profile.costs))
    if missing:
        label = next(node.label for node in nodes if node.cost_class == missing[0])
        raise PlanError(
            f"the profile has {len(profile.costs)} cost classes but lacks {len(missing)} of the model's, "
            f"for example that of unit {label}. Profile the model anew."
        )
    return [profile.costs[node.cost_class] for node in nodes]


@dataclass(frozen=True, slots=True, eq=False)
class _Glue:
    """Bytes that operations add to the calls that are their homes."""

    saved_bytes: Floats
    gradient_bytes: Floats


def _with_operations(
    graph: ModelGraph, homes: Sequence[int | None], costs: Sequence[UnitCost], profile: Profile
) -> tuple[list[Cost], _Glue]:
    """The costs of calls with those of the operations whose homes they are."""
    totals: list[Cost] = list(costs)
    glue = _Glue(*(np.zeros(len(costs)) for _ in range(2)))
    for node, home in zip(graph.nodes, homes, strict=True):
        if home is None:
            continue
        # While a node's backward runs, the gradients of its results and of its inputs are there.
        around = (graph.values[value].spec for value in (*node.inputs, *node.outputs))
        gradients = sum(spec.num_bytes for spec in around if spec.requires_grad)
        glue.gradient_bytes[home] = max(glue.gradient_bytes[home], gradients, node.work_bytes)
        if node.kind == "op":
            glue.saved_bytes[home] += node.saved_bytes
            cost = profile.costs.get(node.cost_class)
            if cost is not None:
                # The runtime puts off the gradients of units' weights alone.
                totals[home] += Cost(cost.forward_s, cost.backward_s)
    return totals, glue


def _flows(graph: ModelGraph, homes: Sequence[int | None]) -> tuple[Flow, ...]:
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
            flows.append(
                Flow(
                    source=source,
                    targets=tuple(sorted(targets)),
                    num_bytes=value.spec.num_bytes,
                    gradient_bytes=value.spec.num_bytes if gradient_targets else 0,
                    gradient_targets=tuple(sorted(gradient_targets)),
                )
            )
    return tuple(flows)


def _saved_values(graph: ModelGraph, homes: Sequence[int | None]) -> tuple[SavedValue, ...]:
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
                num_bytes=value.spec.num_bytes,
                savers=tuple(savers.get(index, ())),
                glue_savers=tuple(glue_savers.get(index, ())),
                readers=tuple(home_of[r] for r in readers if graph.nodes[r].kind == "unit"),
                sent=max(returning, default=-1),
            )
        )
    return tuple(found)


def _parameter_uses(graph: ModelGraph, homes: Sequence[int | None]) -> tuple[ParameterUse, ...]:
    uses: dict[str, set[int]] = {}
    for node, home in zip(graph.nodes, homes, strict=True):
        own = graph.units[node.name].parameters if node.kind == "unit" else ()
        for name in (*own, *node.parameters):
            if home is not None:
                uses.setdefault(name, set()).add(home)
    return tuple(
        ParameterUse(
            name=name,
            num_bytes=parameter.spec.num_bytes,
            trained=parameter.spec.requires_grad and not parameter.is_buffer,
            calls=tuple(sorted(uses[name])),
            num_elements=prod(parameter.spec.shape),
            is_buffer=parameter.is_buffer,
        )
        for name, parameter in graph.parameters.items()
        if name in uses
    )

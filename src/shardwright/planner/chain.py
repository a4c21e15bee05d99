"""A model as a chain: unit calls in execution order, what each costs, and what flows between them.

A stage is an interval of the chain. Calls that must not be spread over stages form one *atom*; the chain is
cut between atoms only::

    calls    c0   c1   c2   c3   c4   c5          c1 and c3 call one unit that updates its buffers
    atoms   [c0] [c1   c2   c3] [c4] [c5]
    cuts    0    1              4         6       stages (0, 1], (1, 4], (4, 6]

Operations between calls have a home too: the latest call that they rest on, or, where they rest on parameters
alone, the first call that needs them. So every value has one home, and crosses to the calls that read it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import nan

import numpy as np
from numpy.typing import NDArray

from shardwright.errors import PlanError
from shardwright.model_graph import ModelGraph, Node
from shardwright.planner.bonds import Bond, bonds_of_groups, bonds_of_units
from shardwright.profile import Profile, Provenance, UnitCost

__all__ = ["Chain", "Flow", "ParameterUse", "SavedValue", "build_chain"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Flow:
    """A value, from the call that is its home to the later calls that read it.

    Attributes:
        source: position of the call in the chain.
        targets: positions of the calls that read it, ascending, all after `source`.
        num_bytes: size of the value.
        gradient_bytes: size of the gradient that comes back; 0 if none does.
        gradient_targets: those of `targets` that send a gradient back.
    """

    source: int
    targets: tuple[int, ...]
    num_bytes: int
    gradient_bytes: int
    gradient_targets: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedValue:
    """A value that several calls keep for their backward: it takes memory once.

    Attributes:
        source: position of the call that is its home.
        num_bytes: size of the value.
        savers: positions of the calls that keep it.
        glue_savers: for each operation that keeps it, the call at which it is at home.
        readers: positions of the calls that read it, and keep it when they are recomputed.
        sent: the last call that sends a gradient back; a stage that ends before it keeps the value.
    """

    source: int
    num_bytes: int
    savers: tuple[int, ...]
    glue_savers: tuple[int, ...]
    readers: tuple[int, ...]
    sent: int

    def keepers(self, recompute: Sequence[bool] | Mapping[int, bool]) -> list[int]:
        """The calls that keep it, with repetitions, when these calls are recomputed."""
        kept = [call for call in self.savers if not recompute[call]]
        kept += [call for call in self.readers if recompute[call]]
        return [*kept, *self.glue_savers]


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """A parameter or buffer, and the calls that read it.

    Attributes:
        name: its first name.
        num_bytes: its size.
        trained: it has a gradient and optimizer state.
        calls: positions of the calls, ascending.
    """

    name: str
    num_bytes: int
    trained: bool
    calls: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Unit calls in execution order.

    Attributes:
        labels: label of each call.
        starts: position of the first call of each atom, then the number of calls.
        forward_s: seconds of the forward of each call and of the operations whose home it is.
        backward_s: seconds of their whole backward, recomputation not counted.
        weight_s: the part of `backward_s` that computes gradients of weights.
        recompute_s: seconds of recomputing the call; operations are never recomputed.
        saved_bytes: bytes that a call keeps from forward to backward.
        kept_bytes: bytes that it keeps when it is recomputed.
        glue_bytes: bytes kept by the operations whose home the call is.
        work_bytes: temporary memory of the call, or of an operation at home with it.
        weight_bytes: bytes that ``I`` of a call leaves for ``W``; NaN: not known.
        split_work_bytes: `work_bytes` where the backward is split.
        saved_values: values that more than one call may keep.
        batch_bytes: the tensors of a microbatch.
        flows: what crosses when the chain is cut.
        parameters: all parameters and buffers that some call reads.
        provenance: ``"measured"`` if all costs are.
        bonds: which calls must share a stage, and why.
    """

    labels: tuple[str, ...]
    starts: tuple[int, ...]
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    recompute_s: Floats
    saved_bytes: Floats
    kept_bytes: Floats
    glue_bytes: Floats
    work_bytes: Floats
    flows: tuple[Flow, ...]
    parameters: tuple[ParameterUse, ...]
    provenance: Provenance
    weight_bytes: Floats
    split_work_bytes: Floats
    saved_values: tuple[SavedValue, ...] = ()
    batch_bytes: int = 0
    bonds: tuple[Bond, ...] = ()

    @property
    def num_calls(self) -> int:
        """Unit calls."""
        return len(self.labels)

    @property
    def num_atoms(self) -> int:
        """Pieces that the chain can be cut into at most."""
        return len(self.starts) - 1

    @property
    def atom_of_call(self) -> NDArray[np.int64]:
        """The atom of each call."""
        sizes = np.diff(np.asarray(self.starts))
        return np.repeat(np.arange(self.num_atoms), sizes)

    def ties(self) -> tuple[tuple[ParameterUse, ...], ...]:
        """Groups of parameters that the same several atoms read, largest first."""
        atom = self.atom_of_call
        groups: dict[tuple[int, ...], list[ParameterUse]] = {}
        for use in self.parameters:
            atoms = tuple(dict.fromkeys(int(atom[call]) for call in use.calls))
            if len(atoms) > 1:
                groups.setdefault(atoms, []).append(use)
        return tuple(
            sorted((tuple(group) for group in groups.values()), key=lambda g: -sum(u.num_bytes for u in g))
        )

    def contract(self, spans: Iterable[tuple[int, int]]) -> "Chain":
        """The chain with all atoms between the first and the last call of each span made one."""
        inner = np.zeros(self.num_calls + 1, dtype=bool)
        for first, last in spans:
            inner[first + 1 : last + 1] = True
        return replace(self, starts=tuple(start for start in self.starts if not inner[start]))

    def bound(self, *, stages_per_rank: int) -> "Chain":
        """The chain with all calls that must share a stage made one atom."""
        held = (bond for bond in self.bonds if stages_per_rank > 1 or not bond.one_rank)
        return self.contract((bond.first, bond.last) for bond in held)

    def uncontracted(self) -> "Chain":
        """The chain with every call an atom of its own."""
        return replace(self, starts=tuple(range(self.num_calls + 1)))


def build_chain(graph: ModelGraph, profile: Profile) -> Chain:
    """Makes the chain of a traced model.

    Raises:
        PlanError: the model calls no unit, or the profile lacks the cost of one.
    """
    calls = graph.calls
    if not calls:
        raise PlanError("the step function calls no unit of the model, so there is nothing to place.")
    nodes = [graph.nodes[call] for call in calls]
    costs = _costs(nodes, profile)
    homes = _home_calls(graph)
    glue = _glue(graph, homes, profile, num_calls=len(calls))
    recompute_s = np.array([cost.forward_s for cost in costs])
    work_bytes = np.array([float(cost.work_bytes) for cost in costs])
    split_work_bytes = np.array(
        [float(cost.work_bytes if cost.split_work_bytes is None else cost.split_work_bytes) for cost in costs]
    )
    chain = Chain(
        labels=tuple(node.label for node in nodes),
        starts=tuple(range(len(calls) + 1)),
        forward_s=recompute_s + glue.forward_s,
        backward_s=np.array([cost.backward_s for cost in costs]) + glue.backward_s,
        weight_s=np.array([min(cost.weight_s, cost.backward_s) for cost in costs]),
        recompute_s=recompute_s,
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
    """What operations add to the calls that are their homes."""

    forward_s: Floats
    backward_s: Floats
    saved_bytes: Floats
    gradient_bytes: Floats


def _glue(graph: ModelGraph, homes: Sequence[int | None], profile: Profile, *, num_calls: int) -> _Glue:
    glue = _Glue(*(np.zeros(num_calls) for _ in range(4)))
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
                glue.forward_s[home] += cost.forward_s
                glue.backward_s[home] += cost.backward_s
    return glue


def _home_calls(graph: ModelGraph) -> list[int | None]:
    """For each node, the position of its home in the chain; None for free nodes and for what nobody reads."""
    position = {node: at for at, node in enumerate(graph.calls)}
    homes: list[int | None] = []
    for index, node in enumerate(graph.nodes):
        if node.kind == "unit":
            homes.append(position[index])
        else:
            known = (homes[graph.values[value].producer] for value in node.inputs)
            homes.append(max((home for home in known if home is not None), default=None))
    consumers = graph.consumers()
    for index in reversed(range(len(graph.nodes))):
        node = graph.nodes[index]
        if homes[index] is None and not node.free:
            readers = (homes[reader] for value in node.outputs for reader in consumers[value])
            homes[index] = min((home for home in readers if home is not None), default=None)
    return homes


def _flows(graph: ModelGraph, homes: Sequence[int | None]) -> tuple[Flow, ...]:
    contributing = _contributing(graph)
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
                if value.spec.requires_grad and reader in contributing:
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
    contributing, consumers = _contributing(graph), graph.consumers()
    home_of = {node: home for node, home in enumerate(homes) if home is not None}
    found = []
    for index, value in enumerate(graph.values):
        source = homes[value.producer]
        readers = [reader for reader in consumers[index] if reader in home_of]
        if source is None or value.free or not readers:
            continue
        returning = [home_of[r] for r in readers if value.spec.requires_grad and r in contributing]
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


def _contributing(graph: ModelGraph) -> set[int]:
    """Nodes that a gradient passes on its way back from the loss."""
    if graph.loss is None:
        return set()
    found: set[int] = set()
    pending = [graph.values[graph.loss].producer]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [
                graph.values[value].producer
                for value in graph.nodes[node].inputs
                if graph.values[value].spec.requires_grad
            ]
    return found


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
        )
        for name, parameter in graph.parameters.items()
        if name in uses
    )

"""Finds the calls of the chain that must share a stage.

The home of a group of nodes (`Together`) is that of its last node: operations of the group move there, units
cannot. A reader of a moved operation comes after it, so a unit that reads one is bound too::

    calls     c0      c1      c2      c3          x = x - mean          at home with c0, whose input it makes
    nodes   x - mean                 mean += ..   mean += x.mean()      at home with c3
    bond      └──────────────────────┘            c0 reads what moves to c3: they share a stage, and so does
                                                  what lies between

Where a rank has several stages, it computes an operation on the stage that it has reached, which may be later
than the stages of the inputs; and no call of an earlier stage may follow. There the bonds assume the latest
possible home, and reach from the call after an operation to where the operation moves.

A model as a chain: unit calls in execution order, their costs, and the values between them.

A stage is an interval of the chain. Calls that must share a stage form one *atom*; cuts fall only between
atoms::

    calls    c0   c1   c2   c3   c4   c5          c1 and c3 call one unit that updates its buffers
    atoms   [c0] [c1   c2   c3] [c4] [c5]
    cuts    0    1              4         6       stages (0, 1], (1, 4], (4, 6]
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwright.model_graph import ModelGraph, Together
from shardwright.profile import Cost, Provenance


@dataclass(frozen=True, slots=True)
class Bond:
    """Calls that must share a stage, with all that lies between.

    Attributes:
        reason: why, as the part of a sentence.
        remedy: what the user can do about it.
        one_rank: it holds only where a rank has several stages.
    """

    first: int
    last: int
    reason: str
    remedy: str
    one_rank: bool = False


def bonds_of_units(graph: ModelGraph) -> list[Bond]:
    """The calls of every unit that changes its buffers: they must run on one rank."""
    found = []
    for name, unit in graph.units.items():
        if unit.mutates_buffers and unit.num_calls > 1:
            at = [position for position, call in enumerate(graph.calls) if graph.nodes[call].name == name]
            reason = f"the unit {name}, which updates buffers in each call"
            found.append(Bond(at[0], at[-1], reason, "Use one module for each call."))
    return found


def bonds_of_groups(graph: ModelGraph, homes: Sequence[int | None]) -> list[Bond]:
    """The bonds that the groups of the graph demand."""
    if not graph.together:
        return []
    call = -1
    upcoming: list[int] = []
    earliest: list[int] = []
    latest: list[int] = []
    for node, home in zip(graph.nodes, homes, strict=True):
        if node.kind == "unit":
            call += 1
        upcoming.append(call + 1)
        # What nobody reads is computed where the program has got to.
        earliest.append(max(call, 0) if home is None else home)
        latest.append(max(call, earliest[-1]))
    always = [group for group in graph.together if not group.one_rank]
    found = _bonds(graph, always, earliest, None)
    return found + _bonds(graph, graph.together, latest, upcoming)


def _bonds(
    graph: ModelGraph, groups: Sequence[Together], homes: Sequence[int], upcoming: Sequence[int] | None
) -> list[Bond]:
    """The bonds of groups; where ranks have several stages, with the next call after each node."""
    placed = _moved(graph, groups, homes)
    found = []
    for group in groups:
        last = max(placed[node] for node in group.nodes)
        # Units that read what has moved to the last call share its stage.
        bound = [placed[n] for n in group.nodes if graph.nodes[n].kind == "unit"]
        bound += _readers_before(graph, group, placed, last)
        if upcoming is not None:
            bound += [upcoming[n] for n in group.nodes if graph.nodes[n].kind == "op" and upcoming[n] <= last]
        if bound and min(bound) < last:
            found.append(
                Bond(min(bound), last, f"{group.what} at {group.line}", group.remedy, upcoming is not None)
            )
    return found


def _moved(graph: ModelGraph, groups: Sequence[Together], homes: Sequence[int]) -> list[int]:
    """Homes once every operation of a group is where the group's last node is, and what rests on it, too."""
    placed = list(homes)
    while True:
        before = list(placed)
        for group in groups:
            last = max(placed[node] for node in group.nodes)
            for node in group.nodes:
                if graph.nodes[node].kind == "op":
                    placed[node] = last
        for index, reader in enumerate(graph.nodes):
            if reader.kind == "op":
                made = (placed[graph.values[value].producer] for value in reader.inputs)
                placed[index] = max([placed[index], *made])
        if placed == before:
            return placed


def _readers_before(graph: ModelGraph, group: Together, placed: Sequence[int], last: int) -> list[int]:
    """Positions of calls before `last` that read what rests on an operation of the group."""
    moved = {node for node in group.nodes if graph.nodes[node].kind == "op"}
    found = []
    for index, node in enumerate(graph.nodes):
        if any(graph.values[value].producer in moved for value in node.inputs):
            if node.kind == "op":
                moved.add(index)
            elif placed[index] < last:
                found.append(placed[index])
    return found


_Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Flow:
    """A value, from the call that is its home to the later calls that read it.

    Attributes:
        source: position of the call in the chain.
        targets: positions of the calls that read it, ascending, all after `source`.
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
        savers: positions of the calls that keep it.
        glue_savers: for each operation that keeps it, the call at which it is at home.
        readers: positions of the calls that read it, and keep it when they are recomputed.
        takers: positions of the calls that read it, or at which an operation does; of another rank, their
            stages keep what they have received.
        sent: the last call that sends a gradient back; a stage that ends before it keeps the value.
    """

    source: int
    num_bytes: int
    savers: tuple[int, ...]
    glue_savers: tuple[int, ...]
    readers: tuple[int, ...]
    takers: tuple[int, ...]
    sent: int

    def keepers(self, recompute: Sequence[bool] | Mapping[int, bool]) -> list[int]:
        """The calls that keep it, with repetitions, when these calls are recomputed."""
        kept = [call for call in self.savers if not recompute[call]]
        kept += [call for call in self.readers if recompute[call]]
        return [*kept, *self.glue_savers]


class StateBytes(NamedTuple):
    """The memory of parameters on a rank, in bytes.

    Attributes:
        optimized: the values that an optimizer keeps state for.
        gathered: rows of other ranks while they are at hand.
    """

    parameters: int = 0
    gradients: int = 0
    optimized: int = 0
    gathered: int = 0


@dataclass(frozen=True, slots=True)
class ParameterUse:
    """A parameter or buffer, and the calls that read it.

    Attributes:
        trained: it has a gradient and optimizer state.
        shared: what it takes on a rank where replicas share it; None where they do not.
        updates: ranks that share the optimizer's state for it, or for their rows of it.
        wide: bytes of a gradient, or of what is updated, for each of its own.
    """

    name: str
    num_bytes: int
    trained: bool
    calls: tuple[int, ...]
    num_elements: int = 0
    is_buffer: bool = False
    shared: StateBytes | None = None
    updates: int = 1
    wide: int = 1

    def state(self, *, may_be_shared: bool = True) -> StateBytes:
        """The bytes that it takes on a rank."""
        trained = self.num_bytes if self.trained else 0
        state = StateBytes(self.num_bytes, trained, trained)
        if self.shared is not None and may_be_shared:
            state = self.shared
        return state._replace(
            gradients=state.gradients * self.wide,
            optimized=-(-state.optimized * self.wide // self.updates),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CallCost(Cost):
    """The cost of a unit call, with the seconds of the operations whose home it is.

    Attributes:
        recompute_s: seconds of recomputing the call; operations are never recomputed.
        kept_bytes: bytes that it keeps when it is recomputed.
        glue_bytes: bytes kept by the operations whose home the call is; `saved_bytes` are those of the call.
        work_bytes: temporary memory of the call, or of an operation at home with it.
        split_work_bytes: `work_bytes` where the backward is split.
        forward_exchange_s, backward_exchange_s: the parts of the seconds in which ranks of a tensor-parallel
            group exchange.
        settling_s: seconds in which they settle gradients of the call's unit, once a step.
    """

    recompute_s: float = 0.0
    kept_bytes: int = 0
    glue_bytes: int = 0
    work_bytes: int = 0
    split_work_bytes: int = 0
    forward_exchange_s: float = 0.0
    backward_exchange_s: float = 0.0
    exchange_bytes: int = 0
    settling_s: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """Unit calls in execution order.

    Attributes:
        starts: position of the first call of each atom, then the number of calls.
        flows: what crosses when the chain is cut.
        parameters: all parameters and buffers that some call reads.
        provenance: ``"measured"`` if all costs are.
        saved_values: values that more than one call may keep.
        bonds: which calls must share a stage, and why.
        most_gathered: bytes of rows of other ranks that a rank has at hand at once, at most.
        gatherings: how often in a batch they are gathered where they are more than that; else once.
        reductions: how often in a batch the gradients of shared parameters are reduced between their ranks.
        most_reduced: bytes of them that are reduced at once, at most, in every backward; 0: all are there
            until the last.
        operations: of the step function between its calls, those that every rank computes among them.
    """

    labels: tuple[str, ...]
    starts: tuple[int, ...]
    costs: tuple[CallCost, ...]
    flows: tuple[Flow, ...]
    parameters: tuple[ParameterUse, ...]
    provenance: Provenance
    saved_values: tuple[SavedValue, ...] = ()
    batch_bytes: int = 0
    bonds: tuple[Bond, ...] = ()
    most_gathered: float = inf
    gatherings: int = 1
    reductions: int = 1
    most_reduced: int = 0
    operations: int = 0
    _columns: dict[str, _Floats] = field(default_factory=dict, init=False, repr=False)

    def column(self, name: str) -> _Floats:
        """One attribute of the costs of all calls; NaN where it is not known."""
        if name not in self._columns:
            values = (getattr(cost, name) for cost in self.costs)
            self._columns[name] = np.array([nan if value is None else value for value in values], dtype=float)
        return self._columns[name]

    @property
    def num_calls(self) -> int:
        return len(self.labels)

    @property
    def num_atoms(self) -> int:
        return len(self.starts) - 1

    @property
    def atom_of_call(self) -> NDArray[np.int64]:
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
        return self._cut_at(start for start in self.starts if not inner[start])

    def bound(self, *, stages_per_rank: int) -> "Chain":
        """The chain with all calls that must share a stage made one atom."""
        held = (bond for bond in self.bonds if stages_per_rank > 1 or not bond.one_rank)
        return self.contract((bond.first, bond.last) for bond in held)

    def uncontracted(self) -> "Chain":
        """The chain with every call an atom of its own."""
        return self._cut_at(range(self.num_calls + 1))

    def _cut_at(self, starts: Iterable[int]) -> "Chain":
        found = replace(self, starts=tuple(starts))
        found._columns.update(self._columns)  # of the same costs
        return found

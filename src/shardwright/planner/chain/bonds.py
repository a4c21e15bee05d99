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
"""

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.model_graph import ModelGraph, Together

__all__ = ["Bond", "bonds_of_groups", "bonds_of_units"]


@dataclass(frozen=True, slots=True)
class Bond:
    """Calls that must share a stage, with all that lies between.

    Attributes:
        first: position of the first call.
        last: position of the last one.
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

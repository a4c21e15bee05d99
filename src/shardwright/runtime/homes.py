"""Chooses the *home* of each node of a graph: the stage that computes it.

A unit's home is its stage in the plan. An operation between units is computed where its latest input is made;
an operation on parameters alone, where its result is first needed.
"""

from collections.abc import Mapping, Sequence

from shardwright.errors import TraceError
from shardwright.model_graph import ModelGraph, Together


def home_stages(graph: ModelGraph, stage_of_call: Mapping[int, int], stage_ranks: Sequence[int]) -> list[int]:
    """The stage that computes each node.

    A rank runs the step function from top to bottom, stage after stage, so on each rank the homes ascend
    along the program: an operation that comes up when its rank has gone on to a later stage is computed
    there.
    """
    _refuse_states_apart(graph, stage_of_call)
    together = [
        group
        for group in graph.together
        if not group.one_rank and not (group.for_backward and graph.loss is None)
    ]
    lowest: dict[int, int] = {}
    while True:
        homes = _homes(graph, stage_of_call, stage_ranks, lowest)
        apart = [
            (node, group) for group in together for node in group.nodes if homes[node] < _last(group, homes)
        ]
        if not apart:
            break
        for node, group in apart:
            if graph.nodes[node].kind == "unit":
                raise _cannot_be_together(group)
            lowest[node] = _last(group, homes)
    reached: dict[int, int] = {}
    for node, home in enumerate(homes) if lowest else ():
        # What has moved must not be ahead of its readers, nor of what its rank has still to do before.
        made = (homes[graph.values[value].producer] for value in graph.nodes[node].inputs)
        rank = stage_ranks[home]
        if max([*made, reached.get(rank, 0)], default=0) > home:
            raise _cannot_be_together(
                next(g for g in together if any(n in lowest and homes[n] > home for n in g.nodes))
            )
        reached[rank] = home
    return homes


def _refuse_states_apart(graph: ModelGraph, stage_of_call: Mapping[int, int]) -> None:
    """Refuses calls of a unit on several stages if it changes its buffers: the planner never has them so."""
    for name, unit in graph.units.items():
        if not unit.mutates_buffers or unit.num_calls == 1:
            continue
        calls = [call for call in stage_of_call if graph.nodes[call].name == name]
        if len({stage_of_call[call] for call in calls}) > 1:
            raise TraceError(
                f"{graph.nodes[calls[-1]].line}: {name} changes its buffers, and is called on several stages "
                "in one microbatch. Others come in between, and would find these changes too early or too "
                "late. Place all that comes between its calls on the rank of it (sw.partition), leave the "
                "placement to the planner, or use one module for each call."
            )


def _last(group: Together, homes: Sequence[int]) -> int:
    return max(homes[node] for node in group.nodes)


def _cannot_be_together(group: Together) -> TraceError:
    return TraceError(f"{group.line}: {group.why} {group.remedy}")


def _homes(
    graph: ModelGraph, stage_of_call: Mapping[int, int], stage_ranks: Sequence[int], lowest: Mapping[int, int]
) -> list[int]:
    calls = graph.calls
    homes = [
        None if call is None else stage_of_call[calls[call]] for call in graph.home_calls(free_nodes=True)
    ]
    _heed_the_program(graph, homes, stage_ranks)
    reached: dict[int, int] = {}
    placed: list[int] = []
    for index, node in enumerate(graph.nodes):
        home = homes[index] or 0
        if node.kind == "op":
            home = max([home, *(placed[graph.values[value].producer] for value in node.inputs)])
            home = max(home, lowest.get(index, 0))
            home = max(home, reached.get(stage_ranks[home], 0))
        placed.append(home)
        reached[stage_ranks[home]] = max(home, reached.get(stage_ranks[home], 0))
    return placed


def _heed_the_program(graph: ModelGraph, homes: list[int | None], stage_ranks: Sequence[int]) -> None:
    """Places what rests on no call, and would come after a later stage of its rank, where the program is."""
    running: list[int] = []
    early: list[bool] = []
    for node, home in zip(graph.nodes, homes, strict=True):
        rests_on_call = any(not early[graph.values[value].producer] for value in node.inputs)
        early.append(node.kind == "op" and not rests_on_call)
        own = 0 if early[-1] or home is None else home
        running.append(max(own, running[-1] if running else 0))
    lowest_later = {rank: len(stage_ranks) for rank in stage_ranks}
    for index in reversed(range(len(homes))):
        home = homes[index]
        if home is None or (early[index] and home > lowest_later[stage_ranks[home]]):
            home = running[index]
        homes[index] = home
        lowest_later[stage_ranks[home]] = min(home, lowest_later[stage_ranks[home]])

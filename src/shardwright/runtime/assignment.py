"""Assigns each node of a trace to a stage, following the plan."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan, stage_of_label
from shardwright.runtime.homes import home_stages


@dataclass(frozen=True, slots=True)
class Assignment:
    """The stages of one trace's nodes, and the ranks of these stages.

    Attributes:
        stage_of_call: node that calls a unit -> stage.
        homes: stage that computes each node.
    """

    stage_of_call: Mapping[int, int]
    stage_ranks: tuple[int, ...]
    homes: tuple[int, ...]


def assign(graph: ModelGraph, plan: Plan, holders: Mapping[str, tuple[int, ...]] | None = None) -> Assignment:
    """Assigns the calls of units as the plan says, and all else where it follows from them.

    The step function for which the plan was made calls units in the order of the stages. Another one (an
    evaluation) may call them in another order, or call other units; then every run of calls on one rank
    becomes a stage.
    """
    stage_of_call, stage_ranks = _calls(graph, plan, holders)
    return Assignment(stage_of_call, stage_ranks, tuple(home_stages(graph, stage_of_call, stage_ranks)))


def _calls(
    graph: ModelGraph, plan: Plan, holders: Mapping[str, tuple[int, ...]] | None
) -> tuple[dict[int, int], tuple[int, ...]]:
    """The stage of each call, and the rank of each stage."""
    stages = stage_of_label(plan)
    known = [stages.get(graph.nodes[call].label) for call in graph.calls]
    if None not in known and known == sorted(known, key=lambda stage: stage or 0):
        return dict(zip(graph.calls, (s or 0 for s in known), strict=True)), plan.stage_ranks
    stage_of_call: dict[int, int] = {}
    ranks: list[int] = []
    for call, stage in zip(graph.calls, known, strict=True):
        if stage is not None:
            rank = plan.stage_ranks[stage]
        else:
            rank = _holder(graph, call, holders, preferred=ranks[-1] if ranks else 0)
        if not ranks or ranks[-1] != rank:
            ranks.append(rank)
        stage_of_call[call] = len(ranks) - 1
    return stage_of_call, tuple(ranks) or plan.stage_ranks


def _holder(
    graph: ModelGraph, call: int, holders: Mapping[str, tuple[int, ...]] | None, *, preferred: int
) -> int:
    """A rank that has all parameters of a unit."""
    names = graph.units[graph.nodes[call].name].parameters
    if holders is None or not names:
        return preferred
    common = set.intersection(*(set(holders[name]) for name in names))
    if not common or preferred in common:
        return preferred
    return min(common)

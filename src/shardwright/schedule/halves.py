"""The two halves of a split backward: chooses among candidates, joins halves where a split gains nothing.

``I`` and ``W`` apart cost a little more than ``B`` (two walks through the graph instead of one). Where ``W``
directly follows its ``I`` and the stage before does not wait for the gradient, they are joined::

    rank 0 | ... F7 W2 I3 ...         I3 of rank 0 starts after W3 of rank 1 has ended,
    rank 1 | ... I3 W3 F6 ...    ->   so rank 1 may as well run B3
"""

from collections.abc import Iterable, Sequence

from shardwright.schedule.action_graph import ActionGraph, compile_actions
from shardwright.schedule.actions import Action, Kind
from shardwright.schedule.edges import chain_edges
from shardwright.schedule.replay import Timeline, action_seconds, replay
from shardwright.schedule.request import Request, Rows

__all__ = ["fastest", "join_halves"]

_RELATIVE_TIE = 1e-9
"""Candidates whose times differ by less are equal: sums of the same seconds in another order."""


def fastest(candidates: Iterable[Rows], request: Request) -> Rows:
    """The candidate that ends first by the request's costs, halves joined; of equals, the first named."""
    best, best_s = None, float("inf")
    for rows in candidates:
        makespan_s = _play(rows, request)[1].makespan
        if best is None or makespan_s < best_s * (1 - _RELATIVE_TIE):
            best, best_s = rows, makespan_s
    return join_halves(best or [], request)


def join_halves(rows: Rows, request: Request) -> Rows:
    """Makes a ``B`` of each ``I`` with its own ``W`` right behind it where nobody waits for the gradient."""
    graph, timeline = _play(rows, request)
    starts = {
        (action.stage, action.microbatch): timeline.starts[number]
        for number, action in enumerate(graph.actions)
        if action.kind is Kind.BACKWARD_INPUT
    }
    joined = []
    for row, numbers in zip(rows, graph.rows, strict=True):
        joined.append(_join_row(row, timeline.ends[numbers.start : numbers.stop], starts))
    return joined


def _join_row(
    row: Sequence[Action], ends: Sequence[float], starts: dict[tuple[int, int], float]
) -> list[Action]:
    joined: list[Action] = []
    for action, end in zip(row, ends, strict=True):
        own_input = Action(Kind.BACKWARD_INPUT, action.stage, action.microbatch)
        if action.kind is Kind.BACKWARD_WEIGHT and joined and joined[-1] == own_input:
            awaited_s = starts.get((action.stage - 1, action.microbatch), float("inf"))
            if awaited_s >= end * (1 - _RELATIVE_TIE):
                joined[-1] = Action(Kind.BACKWARD, action.stage, action.microbatch)
                continue
        joined.append(action)
    return joined


def _play(rows: Rows, request: Request) -> tuple[ActionGraph, Timeline]:
    graph = compile_actions(
        rows,
        stage_ranks=request.stage_ranks,
        num_microbatches=request.num_microbatches,
        edges=chain_edges(request.num_stages),
    )
    return graph, replay(graph, action_seconds(graph, request.costs))

"""Simulates a schedule: seconds, idle time and memory.

It replays the rows that the runtime executes, with the seconds of each stage and the links between the ranks.
Transfers overlap compute, except for the share that keeps the cores at their ends busy (`Link.occupancy`).
Messages on one channel (a directed pair of ranks) wait for one another's bytes. So do copies between a rank
and its host's memory, which run beside compute and messages. What leaves unit by unit begins in the forward,
which ends when all but the last units have left; the backward ends when they have come back.

Ranks on CPUs share the cores of their node. When more ranks compute at once than there are cores, each runs
at the rate cores / computing, from event to event::

    2 ranks, 1 core     rank 0 [ alone, rate 1 ][ both, rate 1/2          ]
                        rank 1                  [ both, rate 1/2          ][ alone, rate 1 ]
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, starmap
from typing import NamedTuple

from shardwright.cluster import Link
from shardwright.errors import ScheduleError
from shardwright.schedule.action_graph import ActionGraph, compile_actions, host_copies_of
from shardwright.schedule.actions import Action, Edge, Kind, StageCost, check_costs, check_edges
from shardwright.schedule.replay import (
    Handling,
    Price,
    Timeline,
    action_seconds,
    replay,
    replay_on_shared_cores,
)
from shardwright.schedule.schedule import Schedule


class Event(NamedTuple):
    """One action on the predicted timeline."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """The simulated cost of a schedule.

    Attributes:
        step_s: seconds from the first start to the last end.
        busy_s: for each rank, the seconds in which an action runs, alone or sharing a core.
        bubble: idle share of the ranks' time, 0 to 1.
        events: the compute actions with start and end, row by row.
        transfers: the sends, from leaving to arriving, on the rank that sends.
        copied: the copies to the host and back, on their rank; of what leaves unit by unit, the last ones,
            in no time where they stay, as the backward comes next.
        peak_microbatches: for each stage, the most microbatches between the start of ``F`` and the end of
            ``B`` or ``I``.
        peak_bytes: for each rank, the most bytes kept for backwards: `saved_bytes` from the start of ``F`` to
            the end of ``B`` or ``I``, then `weight_bytes` to the end of ``W``; less what is at the host, from
            the end of ``OFFLOAD`` to the start of ``LOAD``. Where units leave one by one, `window_bytes` more
            in ``F`` and in ``B`` or ``I``, and `tail_bytes` from there to ``OFFLOAD`` and ``LOAD``.
        unread: for each pair (sending rank, receiving rank), the most messages that have left and whose
            action has not started.
    """

    step_s: float
    busy_s: tuple[float, ...]
    bubble: float
    events: tuple[Event, ...]
    transfers: tuple[Event, ...]
    peak_microbatches: tuple[int, ...]
    peak_bytes: tuple[int, ...]
    unread: Mapping[tuple[int, int], int]
    copied: tuple[Event, ...] = ()

    @property
    def host_copies(self) -> tuple[Event, ...]:
        """The copies that take time."""
        return tuple(copy for copy in self.copied if copy.end_s > copy.start_s)


def simulate(
    schedule: Schedule,
    costs: Sequence[StageCost],
    *,
    edges: Sequence[Edge] | None = None,
    link: Callable[[int, int], Link] | None = None,
    host: Link | None = None,
    cores: int = 0,
    ranks_per_node: int = 0,
    action_overhead_s: float = 0.0,
    forward_overhead_s: float = 0.0,
) -> Simulation:
    """Plays a schedule out.

    A message leaves when its send is reached; its receive is taken to be posted in time (`lower` sees to it).

    Args:
        schedule: its transfers are passed over, and those of `lower` played; `validate` refuses others.
        costs: of each stage.
        edges: which stages feed which, with bytes; None where each feeds the next with a message of no bytes.
        link: the link from one pipeline rank to another; None where messages take no time.
        host: the way from each rank to the memory of its host; None where copies take no time.
        cores: CPU cores that the ranks of a node share; 0 where every rank has a device of its own.
        ranks_per_node: ranks of a node, numbered node by node; 0 where all are on one.
        action_overhead_s: seconds that every compute action takes on top.
        forward_overhead_s: seconds that every forward takes on top of that.

    Raises:
        ScheduleError: the schedule is not complete or deadlocks, or a number cannot be used.

    >>> from shardwright.schedule import build_schedule, unit_costs
    >>> schedule = build_schedule("1f1b", stage_ranks=(0, 1), num_microbatches=3)
    >>> simulation = simulate(schedule, unit_costs(2))
    >>> simulation.step_s, simulation.bubble, simulation.peak_microbatches
    (12.0, 0.25, (2, 1))
    """
    _refuse_negative(
        cores=cores,
        ranks_per_node=ranks_per_node,
        action_overhead_s=action_overhead_s,
        forward_overhead_s=forward_overhead_s,
    )
    costs = check_costs(costs, num_stages=schedule.num_stages)
    edges = check_edges(edges, num_stages=schedule.num_stages)
    graph = compile_actions(
        schedule.actions,
        stage_ranks=schedule.stage_ranks,
        num_microbatches=schedule.num_microbatches,
        edges=edges,
    )
    handling = _handling(schedule, edges, link, costs, host)
    seconds = action_seconds(
        graph,
        costs,
        overhead_s=action_overhead_s,
        forward_overhead_s=forward_overhead_s,
        handling=handling,
    )
    prices = _prices(schedule.stage_ranks, edges, link) + _copy_prices(costs, host)
    beside = _beside(graph, costs, host)
    if cores:
        nodes = [rank // (ranks_per_node or schedule.num_ranks) for rank in range(schedule.num_ranks)]
        timeline = replay_on_shared_cores(graph, seconds, prices, beside=beside, nodes=nodes, cores=cores)
    else:
        timeline = replay(graph, seconds, prices, beside)
    return _summary(schedule, graph, timeline, edges, costs)


def _refuse_negative(**options: float) -> None:
    for name, value in options.items():
        if value < 0:
            raise ScheduleError(f"{name} is {value}. Give 0 or more.")


def _prices(
    stage_ranks: Sequence[int], edges: Sequence[Edge], link: Callable[[int, int], Link] | None
) -> list[Price]:
    """For each edge, forward and backward: seconds on the channel, and latency."""
    if link is None:
        return [(0.0, 0.0)] * (2 * len(edges))
    prices = []
    for edge in edges:
        source, target = stage_ranks[edge.source], stage_ranks[edge.target]
        for sender, receiver, num_bytes in (
            (source, target, edge.num_bytes),
            (target, source, edge.backward_bytes),
        ):
            if source == target:
                prices.append((0.0, 0.0))
                continue
            way = link(sender, receiver)
            prices.append((num_bytes / way.bandwidth_Bps, way.latency_s))
    return prices


def _copy_prices(costs: Sequence[StageCost], host: Link | None) -> list[Price]:
    """For each stage, offload and load, twice (see `Message`): a copy is over before the next one begins."""
    prices = []
    for cost in costs:
        seconds = host.seconds(cost.copied_bytes) if host is not None and cost.copied_bytes else 0.0
        # Of what leaves unit by unit, the last ones are still there.
        stays = 0.0 if cost.offload_bytes else seconds
        prices += [(seconds, 0.0), (seconds, 0.0), (stays, 0.0), (stays, 0.0)]
    return prices


def _beside(graph: ActionGraph, costs: Sequence[StageCost], host: Link | None) -> dict[int, float]:
    """Seconds of copies beside each action of a stage that offloads unit by unit."""
    copied = {action.stage for actions in graph.copies.values() for action in actions}
    if host is None or not any(costs[stage].beside_bytes for stage in copied):
        return {}
    return {
        number: costs[action.stage].beside_bytes / host.bandwidth_Bps
        for number, action in enumerate(graph.actions)
        if action.stage in copied and action.kind is not Kind.BACKWARD_WEIGHT
    }


def _handling(
    schedule: Schedule,
    edges: Sequence[Edge],
    link: Callable[[int, int], Link] | None,
    costs: Sequence[StageCost],
    host: Link | None,
) -> list[Handling]:
    """For each stage: seconds in which messages and copies keep its core from computing, in and back."""
    stage_ranks = schedule.stage_ranks
    handling = [(0.0, 0.0)] * len(stage_ranks)
    if host is not None and host.occupancy and schedule.has_host_copies:
        copies_s = [host.occupancy * cost.offload_bytes / host.bandwidth_Bps for cost in costs]
        handling = list(zip(copies_s, copies_s, strict=True))
    if link is None:
        return handling
    for edge in edges:
        source, target = stage_ranks[edge.source], stage_ranks[edge.target]
        if source == target:
            continue
        there, back = link(source, target), link(target, source)
        forward_s = there.occupancy * there.seconds(edge.num_bytes)
        backward_s = back.occupancy * back.seconds(edge.backward_bytes) if edge.has_gradient else 0.0
        for stage in (edge.source, edge.target):
            before = handling[stage]
            handling[stage] = before[0] + forward_s, before[1] + backward_s
    return handling


def _summary(
    schedule: Schedule,
    graph: ActionGraph,
    timeline: Timeline,
    edges: Sequence[Edge],
    costs: Sequence[StageCost],
) -> Simulation:
    starts, ends, actions = timeline.starts, timeline.ends, graph.actions
    events: list[Event] = []
    busy = []
    for rank, row in enumerate(graph.rows):
        row_events = [Event(rank, actions[i], starts[i], ends[i]) for i in row]
        busy.append(sum(event.end_s - event.start_s for event in row_events))
        events += row_events
    step_s = timeline.makespan
    peak_microbatches, peak_bytes = _peaks(graph, costs)
    copies = tuple(starmap(Event, host_copies_of(graph, timeline.departures)))
    if copies:
        peak_bytes = _peaks_over_time(events, copies, costs, num_ranks=schedule.num_ranks)
    return Simulation(
        step_s=step_s,
        busy_s=tuple(busy),
        bubble=1.0 - sum(busy) / (len(busy) * step_s) if step_s else 0.0,
        events=tuple(events),
        transfers=_transfers(schedule.stage_ranks, graph, timeline, edges),
        peak_microbatches=peak_microbatches,
        peak_bytes=peak_bytes,
        unread=_unread(schedule.stage_ranks, graph, timeline, edges),
        copied=copies,
    )


def _unread(
    stage_ranks: Sequence[int], graph: ActionGraph, timeline: Timeline, edges: Sequence[Edge]
) -> dict[tuple[int, int], int]:
    moments: dict[tuple[int, int], list[tuple[float, int]]] = {}
    for consumer, price, leaves, arrives in timeline.departures:
        if price >= graph.first_copy:
            continue
        edge = edges[price // 2]
        pair = stage_ranks[edge.source], stage_ranks[edge.target]
        read = max(arrives, timeline.starts[consumer])
        moments.setdefault(pair[::-1] if price % 2 else pair, []).extend([(leaves, 1), (read, -1)])
    # At one moment, a message is read before the next one leaves; one that is read at once counts.
    return {pair: max(1, *accumulate(change for _, change in sorted(each))) for pair, each in moments.items()}


def _transfers(
    stage_ranks: Sequence[int], graph: ActionGraph, timeline: Timeline, edges: Sequence[Edge]
) -> tuple[Event, ...]:
    transfers = []
    for consumer, price, leaves, arrives in timeline.departures:
        if price >= graph.first_copy:
            continue
        edge = edges[price // 2]
        if price % 2:
            kind, stage, peer = Kind.SEND_B, edge.target, edge.source
        else:
            kind, stage, peer = Kind.SEND_F, edge.source, edge.target
        send = Action(kind, stage, graph.actions[consumer].microbatch, peer)
        transfers.append(Event(stage_ranks[stage], send, leaves, arrives))
    return tuple(transfers)


def _peaks(graph: ActionGraph, costs: Sequence[StageCost]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Most microbatches of each stage, most bytes of each rank; a rank runs one action at a time."""
    kept, most = [0] * len(costs), [0] * len(costs)
    later = [cost.left_bytes for cost in costs]
    peak_bytes = []
    for row in graph.rows:
        held = peak = 0
        for number in row:
            action = graph.actions[number]
            kind, stage = action.kind, action.stage
            if kind is Kind.FORWARD:
                kept[stage] += 1
                held += costs[stage].saved_bytes
                most[stage] = max(most[stage], kept[stage])
            elif kind is Kind.BACKWARD_WEIGHT:
                held -= later[stage]
            else:
                kept[stage] -= 1
                held -= costs[stage].saved_bytes
                if kind is Kind.BACKWARD_INPUT:
                    held += later[stage]
            peak = max(peak, held)
        peak_bytes.append(peak)
    return tuple(most), tuple(peak_bytes)


def _peaks_over_time(
    events: Sequence[Event], copies: Sequence[Event], costs: Sequence[StageCost], *, num_ranks: int
) -> tuple[int, ...]:
    """Most bytes of each rank, where copies run beside its actions."""
    copied = {(copy.action.stage, copy.action.microbatch) for copy in copies}
    moments: list[list[tuple[float, int]]] = [[] for _ in range(num_ranks)]
    for event in (*events, *copies):
        stage, kind = event.action.stage, event.action.kind
        changes = costs[stage].changes(kind, copied=(stage, event.action.microbatch) in copied)
        moments[event.rank] += zip((event.start_s, event.end_s), changes, strict=True)
    # At one moment, what is let go of goes before what is kept anew.
    return tuple(max(0, *accumulate(change for _, change in sorted(each))) if each else 0 for each in moments)

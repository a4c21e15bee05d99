"""The stage of each node of a graph, following the plan, and the values that cross stages.

A unit's home is its stage in the plan. An operation between units is computed where its latest input is made;
an operation on parameters alone, where its result is first needed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from shardwright.errors import TraceError
from shardwright.model_graph import ModelGraph, TensorSpec, Together
from shardwright.plan import Plan, stage_of_label
from shardwright.runtime.dataflow import Dataflow


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


@dataclass(frozen=True, slots=True)
class Assignment:
    """The stages of one trace's nodes, and the ranks of these stages.

    Attributes:
        stage_of_call: node that calls a unit -> stage.
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


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that one stage makes and another reads.

    Attributes:
        detached: none does, as the units that read it gave none in the trace.
        order: of its dims in memory, where that is not their own; of its gradient's, too.
        part: sizes of what this rank has of it, where ranks share a batch; None: all.
    """

    value: int
    source: int
    target: int
    spec: TensorSpec
    has_gradient: bool
    detached: bool = False
    order: tuple[int, ...] | None = None
    part: tuple[int, ...] | None = None

    @property
    def message_shape(self) -> tuple[int, ...]:
        """The sizes of what is sent, in the order of memory, in which it is sent."""
        shape = self.spec.shape if self.part is None else self.part
        return shape if self.order is None else tuple(shape[dim] for dim in self.order)


Crossings = Mapping[tuple[int, int], tuple[Crossing, ...]]
"""(source, target) -> what goes from the one stage to the other, by ascending value; pairs ascend, too."""

PartOf = Callable[[tuple[int, ...]], tuple[int, ...] | None]


def crossings_of(dataflow: Dataflow, *, part_of: PartOf | None = None) -> Crossings:
    """The values sent from stage to stage."""
    graph, homes = dataflow.trace.graph, dataflow.homes
    found: dict[tuple[int, int], dict[int, Crossing]] = {}
    contributes = graph.contributing()
    for value, reader in dataflow.crossings:
        source, target = dataflow.home_of[value], homes[reader]
        spec = graph.values[value].spec
        pair = found.setdefault((source, target), {})
        gradient = spec.requires_grad and graph.loss is not None and reader in contributes
        detached = value in graph.nodes[reader].detached
        before = pair.get(value)
        has_gradient = (before is not None and before.has_gradient) or (gradient and not detached)
        pair[value] = Crossing(
            value,
            source,
            target,
            spec,
            has_gradient,
            detached=not has_gradient and gradient and detached,
            order=dataflow.trace.tensors.orders.get(value),
            part=None if part_of is None else part_of(spec.shape),
        )
    return {pair: tuple(group[value] for value in sorted(group)) for pair, group in sorted(found.items())}


def gradients_of(crossings: Crossings) -> Crossings:
    """The gradients sent back, each in the form of its value: (reader, maker) -> values."""
    back = {
        (target, source): tuple(crossing for crossing in group if crossing.has_gradient)
        for (source, target), group in crossings.items()
    }
    return {pair: group for pair, group in back.items() if group}

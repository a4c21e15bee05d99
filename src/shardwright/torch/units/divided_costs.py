"""What divided units, and operations between units, cost the busiest rank, by dry runs of each kind."""

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Protocol

from shardwright.placement import BetweenUnits, Cut
from shardwright.planner.division import DividedUnit, Passage
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search import (
    CutTensor,
    DryRun,
    Phase,
    Unit,
    WorkShares,
    dry_run,
    dry_run_of_operation,
)
from shardwright.torch.tracing.trace_data import Sample, Trace

__all__ = ["PartTimer", "UnitPart", "divided_operations", "divided_units"]

_MOST_PACE = 2.0
"""Beyond it a timing was disturbed, or a unit so small that nothing follows from it."""


@dataclass(frozen=True, slots=True)
class UnitPart:
    """What one rank has of a unit.

    Attributes:
        cuts: of its parameters, by name.
        experts: those of them that all ranks of a grid share.
        rank, num_ranks: who has it, of all that share a batch.
        between: where tensors between units are.
    """

    unit: Unit
    cuts: Mapping[str, Cut]
    experts: Set[str]
    rank: int
    num_ranks: int
    prices: Prices
    between: BetweenUnits


class PartTimer(Protocol):
    """Says what a part takes, measured."""

    def __call__(self, part: UnitPart, forward: Phase, backward: Phase) -> WorkShares | None:
        """Seconds of a part's own operations, over those of the whole unit."""


def divided_units(
    units: Mapping[str, Unit],
    kind_of: Mapping[str, str],
    shares: Mapping[str, WorkShares],
    of_tensor: Mapping[int, Cut],
    of_experts: Set[int],
    prices: Prices,
    between: BetweenUnits,
    time_part: PartTimer | None = None,
) -> dict[str, DividedUnit]:
    """What units cost the busiest rank; of each kind one is run."""
    of_kind: dict[tuple[str, frozenset[int]], DividedUnit] = {}
    divided: dict[str, DividedUnit] = {}
    for name, unit in units.items():
        kind = kind_of[name], unit.shared
        if kind not in of_kind:
            named = dict(unit.module.named_parameters())
            own = {key: of_tensor[id(each)] for key, each in named.items() if id(each) in of_tensor}
            experts = frozenset(key for key, each in named.items() if id(each) in of_experts)
            of_kind[kind] = _divided(unit, own, experts, shares[kind[0]], prices, between, time_part)
        divided[name] = of_kind[kind]
    return divided


def _divided(
    unit: Unit,
    own: Mapping[str, Cut],
    experts: Set[str],
    shares: WorkShares,
    prices: Prices,
    between: BetweenUnits,
    time_part: PartTimer | None,
) -> DividedUnit:
    """What a unit costs the busiest rank of the group, with these cuts of its parameters."""
    if not own and not between.cuts:
        return DividedUnit()
    inner = between.inner_ranks
    degree = between.num_ranks * inner
    # Of a batch, or a sequence, the last ones have more.
    order = 1 if between.cuts else -1

    def slices(rank: int) -> int:
        return sum(
            cut.length(rank if inner == 1 or name in experts else rank % inner) for name, cut in own.items()
        )

    busiest = max(range(degree), key=lambda rank: (slices(rank), order * rank))
    whole = dry_run(unit, {}, rank=0, num_ranks=degree, prices=prices)
    parts = [
        dry_run(unit, own, experts=experts, rank=rank, num_ranks=degree, prices=prices, between=between)
        for rank in dict.fromkeys((busiest, *_first_of_uneven(between)))
    ]
    part, sender = parts[0], max(parts, key=_sent_bytes)
    timed = None
    if time_part is not None:
        asked = UnitPart(unit, own, experts, busiest, degree, prices, between)
        timed = time_part(asked, part.forward, part.backward)
    timed = timed or shares
    return DividedUnit(
        forward=_passage(part.forward, sender.forward, shares.forward, timed.forward),
        backward=_passage(part.backward, sender.backward, shares.backward, timed.backward),
        kept_share=part.kept_bytes / whole.kept_bytes if whole.kept_bytes else 1.0,
        settling_calls=part.settling.traffic.calls.total(),
        settling_bytes=part.settling.traffic.sent_bytes.total(),
        inside_share=_share_inside(part, busiest),
    )


def _first_of_uneven(between: BetweenUnits) -> tuple[int, ...]:
    """The first rank, where the last one has most: it may send most, as it scatters most to others."""
    return (0,) if between.is_uneven else ()


def _sent_bytes(found: DryRun) -> int:
    return (found.forward.traffic + found.backward.traffic).sent_bytes.total()


def _share_inside(found: DryRun, rank: int) -> float:
    """What a rank has of the tensors between a unit and the operations that belong to it."""
    shares = [each.length(rank) / each.size if isinstance(each, Cut) else 1.0 for each in found.inside]
    return max(shares, default=1.0)


def divided_operations(
    trace: Trace, prices: Prices, between: BetweenUnits
) -> Iterator[tuple[int, DividedUnit]]:
    """What operations between units cost the busiest rank, by the numbers of their nodes.

    Units give, and take, tensors placed by their shapes; an operation takes them as they are, and leaves what
    comes out cut as it is.
    """
    graph = trace.graph
    placed: dict[int, CutTensor] = {}
    known: dict[tuple[object, ...], tuple[DividedUnit, list[CutTensor | None]]] = {}
    for step in trace.steps:
        if step.node is None:
            continue
        node = graph.nodes[step.node]
        sample = trace.samples.get(node.cost_class)
        placements: list[CutTensor | None] = []
        if node.kind == "op" and sample is not None:
            cuts = {position: placed[value] for position, value in step.reads if value in placed}
            key = node.cost_class, *cuts.items()
            if key not in known:
                known[key] = _operation(sample, cuts, prices, between)
            found, placements = known[key]
            yield step.node, found
        for position, value in step.writes:
            where = placements[position] if position < len(placements) else None
            if node.kind == "unit":
                of_unit = between.placement(graph.values[value].spec.shape)
                where = CutTensor(of_unit, None) if isinstance(of_unit, Cut) else None
            if where is not None:
                placed[value] = where
        for change in step.changes:
            if change.before in placed and change.after is not None:
                placed[change.after] = placed[change.before]


def _operation(
    sample: Sample, cuts: Mapping[int, CutTensor], prices: Prices, between: BetweenUnits
) -> tuple[DividedUnit, list[CutTensor | None]]:
    """What one operation costs, and where its results are."""
    if not cuts:
        return DividedUnit(), []
    last = between.num_ranks - 1
    num_ranks = between.num_ranks * between.inner_ranks
    args, kwargs = sample.structure.rebuild(sample.leaves)
    found = [
        dry_run_of_operation(
            sample.func,
            args,
            kwargs,
            cuts,
            rank=rank,
            num_ranks=num_ranks,
            prices=prices,
            between=between,
        )
        for rank in dict.fromkeys((num_ranks - 1, *_first_of_uneven(between)))
    ]
    (part, placements), (sender, _) = found[0], max(found, key=lambda each: _sent_bytes(each[0]))
    share = min(each.cut.length(last) / each.cut.size for each in cuts.values())
    share /= 1 if between.inner_dim is None else between.inner_ranks
    return (
        DividedUnit(
            forward=_passage(part.forward, sender.forward, share),
            backward=_passage(part.backward, sender.backward, share),
            kept_share=share,
        ),
        placements,
    )


def _passage(phase: Phase, of_sender: Phase, share: float, timed: float | None = None) -> Passage:
    """The passage of the busiest rank."""
    return Passage(
        share=share,
        pace=1.0 if timed is None or not share else min(max(timed / share, 1 / _MOST_PACE), _MOST_PACE),
        calls=of_sender.traffic.calls.total(),
        num_bytes=of_sender.traffic.sent_bytes.total(),
        operations=phase.num_divided,
    )

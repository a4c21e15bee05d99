"""What divided units, and operations between units, cost the busiest rank, by dry runs of each kind."""

from collections.abc import Iterator, Mapping, Set

from shardwright.placement import BetweenUnits, Cut, Placement
from shardwright.planner.chain.division import DividedUnit, Passage
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search import (
    DryRun,
    Phase,
    Unit,
    WorkShares,
    dry_run,
    dry_run_of_operation,
)
from shardwright.torch.tracing.trace_data import Sample, Trace

__all__ = ["divided_operations", "divided_units"]


def divided_units(
    units: Mapping[str, Unit],
    kind_of: Mapping[str, str],
    shares: Mapping[str, WorkShares],
    of_tensor: Mapping[int, Cut],
    of_experts: Set[int],
    prices: Prices,
    between: BetweenUnits,
) -> dict[str, DividedUnit]:
    """What units cost the busiest rank; of each kind one is run.

    Args:
        units: by name.
        kind_of: their kinds.
        shares: of the work of a kind.
        of_tensor: cuts of parameters, by `id`.
        of_experts: those of them that all ranks of a grid share, by `id`.
        prices: of the ranks.
        between: where tensors between units are.
    """
    of_kind: dict[tuple[str, frozenset[int]], DividedUnit] = {}
    divided: dict[str, DividedUnit] = {}
    for name, unit in units.items():
        kind = kind_of[name], unit.shared
        if kind not in of_kind:
            named = dict(unit.module.named_parameters())
            own = {key: of_tensor[id(each)] for key, each in named.items() if id(each) in of_tensor}
            experts = frozenset(key for key, each in named.items() if id(each) in of_experts)
            of_kind[kind] = _divided(unit, own, experts, shares[kind[0]], prices, between)
        divided[name] = of_kind[kind]
    return divided


def _divided(
    unit: Unit,
    own: Mapping[str, Cut],
    experts: Set[str],
    shares: WorkShares,
    prices: Prices,
    between: BetweenUnits,
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
    part = dry_run(unit, own, experts=experts, rank=busiest, num_ranks=degree, prices=prices, between=between)
    return DividedUnit(
        forward=_passage(part.forward, shares.forward),
        backward=_passage(part.backward, shares.backward),
        kept_share=part.kept_bytes / whole.kept_bytes if whole.kept_bytes else 1.0,
        settling_calls=part.settling.traffic.calls.total(),
        settling_bytes=part.settling.traffic.sent_bytes.total(),
        inside_share=_share_inside(part, busiest),
    )


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
    placed: dict[int, Cut] = {}
    known: dict[tuple[object, ...], tuple[DividedUnit, list[Placement]]] = {}
    for step in trace.steps:
        if step.node is None:
            continue
        node = graph.nodes[step.node]
        sample = trace.samples.get(node.cost_class)
        placements: list[Placement] = []
        if node.kind == "op" and sample is not None:
            cuts = {position: placed[value] for position, value in step.reads if value in placed}
            key = node.cost_class, *cuts.items()
            if key not in known:
                known[key] = _operation(sample, cuts, prices, between)
            found, placements = known[key]
            yield step.node, found
        for position, value in step.writes:
            of_unit = between.placement(graph.values[value].spec.shape)
            cut = placements[position] if position < len(placements) else of_unit
            if isinstance(cut, Cut) and (node.kind == "unit" or position < len(placements)):
                placed[value] = cut
        for change in step.changes:
            if change.before in placed and change.after is not None:
                placed[change.after] = placed[change.before]


def _operation(
    sample: Sample, cuts: Mapping[int, Cut], prices: Prices, between: BetweenUnits
) -> tuple[DividedUnit, list[Placement]]:
    """What one operation costs, and where its results are.

    Args:
        sample: a call of it.
        cuts: of its arguments, by their places among the leaves.
        prices: by which it is decided.
        between: where sums are put.
    """
    if not cuts:
        return DividedUnit(), []
    last = between.num_ranks - 1
    num_ranks = between.num_ranks * between.inner_ranks
    args, kwargs = sample.structure.rebuild(sample.leaves)
    part, placements = dry_run_of_operation(
        sample.func,
        args,
        kwargs,
        cuts,
        rank=num_ranks - 1,
        num_ranks=num_ranks,
        prices=prices,
        between=between,
    )
    share = min(cut.length(last) / cut.size for cut in cuts.values())
    share /= 1 if between.inner_dim is None else between.inner_ranks
    return (
        DividedUnit(
            forward=_passage(part.forward, share),
            backward=_passage(part.backward, share),
            kept_share=share,
        ),
        placements,
    )


def _passage(phase: Phase, share: float) -> Passage:
    return Passage(
        share=share,
        calls=phase.traffic.calls.total(),
        num_bytes=phase.traffic.sent_bytes.total(),
        operations=phase.num_divided,
    )

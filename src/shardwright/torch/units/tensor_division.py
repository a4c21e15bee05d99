"""Divides the units of a trace over a tensor-parallel group, without running them.

::

    trace ─► one call of each unit ─► search for placements ─► cuts ─► dry run of each kind ─► what it costs

Tensors between units are whole, or cut along the batch or the sequence, as the runtime has them. A unit stays
whole where its code may leave PyTorch's dispatcher. A parameter stays whole where code between units uses it,
or the script has hooked its gradient, or ranks share sequences alone.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from functools import partial

from torch import nn

from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.placement import WHOLE, BetweenUnits, Cut, Placement
from shardwright.plan import TensorPrices
from shardwright.planner.chain.division import DividedUnit, Division, Passage
from shardwright.torch.counting.compiled_modules import calls_compiled, is_compiled
from shardwright.torch.interception.attribute_inputs import FOUND
from shardwright.torch.pytorch.module_hooks import has_backward_hooks
from shardwright.torch.tensor_parallel.experts import cuts_of_experts, reasons_to_stay, run_own_experts
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.pinned import pinned_placements
from shardwright.torch.tensor_parallel.search import (
    DryRun,
    Material,
    Phase,
    Unit,
    WorkShares,
    dry_run,
    dry_run_of_operation,
    find_placements,
)
from shardwright.torch.tracing.divided_tail import DividedTail, TailRun, divided_tails
from shardwright.torch.tracing.trace_data import Sample, Trace

__all__ = ["division_of"]

log = logging.getLogger(__name__)


def division_of(
    model: nn.Module,
    trace: Trace,
    *,
    config: Config,
    mesh: Mesh,
    prices: TensorPrices,
    decided_by: TensorPrices | None = None,
    microbatches: int = 1,
) -> Division:
    """How ranks that share a batch compute the units of a trace, and what that costs them.

    Args:
        model: that was traced; with data or without.
        trace: of one microbatch.
        config: says along which dimension they share it, and what the search is for.
        mesh: says how many they are.
        prices: of what they exchange and compute.
        decided_by: prices by which an earlier run chose placements, which are then chosen again; by default
            those of today.
        microbatches: of a step.

    Raises:
        PlanError: they are to share sequences, and no tensor between units has any.
    """
    graph, degree = trace.graph, mesh.share
    between, searched = _between(trace, config, mesh)
    experts = {}
    if mesh.expert > 1:
        experts = _experts(model, trace, between)
        run_own_experts(model)
    elif between.cuts:
        _refuse_without_sequences(trace, between, mesh)
    tails = {} if between.cuts else divided_tails(trace)
    units = dict(_units(model, trace, tails))
    shares_layers = mesh.tensor > 1
    # Who shares a batch wants it divided, however long a latency is.
    if decided_by is None:
        decided_by = prices if shares_layers else prices.model_copy(update={"latency_s": 0.0})
    own_prices = Prices(**decided_by.model_dump(), sums_wait=not shares_layers)
    # Each context rank has a part of the work, and of what ranks exchange that share layers.
    found = find_placements(
        units,
        num_ranks=searched.num_ranks,
        prices=_for_a_part(own_prices, mesh.context) if shares_layers else own_prices,
        optimize=config.goal_of_division,
        num_microbatches=microbatches,
        pinned=_pinned(model, graph, mesh, experts),
        between=searched,
    )
    for reason, names in _by_reason(found.kept_whole).items():
        _warn(names, f"its code does not run on tensors without data ({reason})")
    by_any_name = dict(model.named_parameters(remove_duplicate=False))
    of_tensor = {
        id(by_any_name[name]): placement
        for name, placement in found.placements.items()
        if isinstance(placement, Cut)
    }
    # Stages have tensors of their own.
    shared = _shared(trace, model, of_tensor.keys()) if mesh.pipeline == 1 and not between.cuts else {}
    units = {name: replace(unit, shared=shared.get(name, frozenset())) for name, unit in units.items()}
    shares = found.shares
    if mesh.expert > 1:
        # The search sees experts' operations one by one, and not that each rank runs its own.
        shares = defaultdict(lambda: WorkShares(1 / degree, 1 / degree))
    elif between.inner_ranks > 1:
        shares = _of_a_part(shares, units, own_prices, between)
    divided = _divided_units(units, found.kind_of, shares, of_tensor, own_prices, between)
    operations = dict(_operations(trace, own_prices, between)) if between.cuts else {}
    shares_of_values: dict[int, float] = {}
    for node, tail in tails.items():
        share = divided.get(graph.nodes[node].name, DividedUnit()).inside_share
        shares_of_values |= dict.fromkeys(tail.values, share)
        operations |= dict.fromkeys(tail.nodes, DividedUnit.of_share(share))
    cuts = {name: of_tensor[id(each)] for name, each in model.named_parameters() if id(each) in of_tensor}
    if mesh.tensor > 1:
        _tell(graph, cuts, num_ranks=mesh.tensor)
    return Division(
        degree=degree,
        samples=graph.batch_size,
        prices=prices,
        decided_by=decided_by,
        cuts=cuts,
        units=divided,
        operations=operations,
        values=shares_of_values,
        between=between if between.cuts else None,
    )


def _between(trace: Trace, config: Config, mesh: Mesh) -> tuple[BetweenUnits, BetweenUnits]:
    """Where tensors between units are, and where they are for the search of how ranks share layers."""
    dim = config.between_units(mesh)
    shapes = trace.batch_shapes
    if mesh.context == 1 or mesh.tensor == 1:
        found = BetweenUnits.of_batch(shapes, dim, num_ranks=mesh.share)
        return found, found
    again = config.sequence_parallel is True
    both = BetweenUnits.of_batch(
        shapes, dim, num_ranks=mesh.context, inner_ranks=mesh.tensor, cuts_again=again
    )
    return both, BetweenUnits.of_batch(shapes, dim if again else None, num_ranks=mesh.tensor)


def _of_a_part(
    shares: Mapping[str, WorkShares], units: Mapping[str, Unit], prices: Prices, between: BetweenUnits
) -> dict[str, WorkShares]:
    """Shares of the work of units, for the context rank with most of it.

    Args:
        shares: of a tensor rank with whole sequences, by the first unit of each kind.
        units: by name.
        prices: of the ranks.
        between: says who has which part of a sequence.
    """
    names = (
        f"{unit}.{name}" if unit else name
        for unit, each in units.items()
        for name, _ in each.module.named_parameters()
    )
    found = find_placements(
        units,
        num_ranks=between.num_ranks,
        prices=prices,
        pinned=dict.fromkeys(names, WHOLE),
        between=replace(between, inner_ranks=1, cuts_again=False),
    )
    of_parts = {name: found.shares[found.kind_of[name]] for name in shares}
    return {
        name: WorkShares(each.forward * of_parts[name].forward, each.backward * of_parts[name].backward)
        for name, each in shares.items()
    }


def _for_a_part(prices: Prices, num_parts: int) -> Prices:
    """Prices of a whole sequence, where each rank works on a part of it."""
    return replace(
        prices,
        bandwidth_Bps=prices.bandwidth_Bps * num_parts,
        flops_per_s=prices.flops_per_s * num_parts,
        memory_Bps=prices.memory_Bps * num_parts,
    )


def _pinned(
    model: nn.Module, graph: ModelGraph, mesh: Mesh, experts: Mapping[str, Cut]
) -> dict[str, Placement]:
    """Placements that the search may not choose: of what must stay whole, and of what somebody has placed."""
    kept_whole = _kept_whole(model, graph)
    if mesh.tensor > 1:
        return {**pinned_placements(model, num_ranks=mesh.tensor), **kept_whole}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return {name: WHOLE if name in kept_whole else experts.get(name, WHOLE) for name in names}


def _divided_units(
    units: Mapping[str, Unit],
    kind_of: Mapping[str, str],
    shares: Mapping[str, WorkShares],
    of_tensor: Mapping[int, Cut],
    prices: Prices,
    between: BetweenUnits,
) -> dict[str, DividedUnit]:
    """What units cost the busiest rank; of each kind one is run.

    Args:
        units: by name.
        kind_of: their kinds.
        shares: of the work of a kind.
        of_tensor: cuts of parameters, by `id`.
        prices, between: see `_divided`.
    """
    of_kind: dict[tuple[str, frozenset[int]], DividedUnit] = {}
    divided: dict[str, DividedUnit] = {}
    for name, unit in units.items():
        kind = kind_of[name], unit.shared
        if kind not in of_kind:
            named = unit.module.named_parameters()
            own = {key: of_tensor[id(each)] for key, each in named if id(each) in of_tensor}
            of_kind[kind] = _divided(unit, own, shares[kind[0]], prices, between)
        divided[name] = of_kind[kind]
    return divided


def _experts(model: nn.Module, trace: Trace, between: BetweenUnits) -> dict[str, Cut]:
    """How ranks share the experts of a model: the cuts of parameters, by name."""
    degree, samples = between.num_ranks, trace.graph.batch_size
    found = cuts_of_experts(model, num_ranks=degree, units=trace.unit_names)
    stay = reasons_to_stay(model, num_ranks=degree, units=trace.unit_names)
    asked = f"expert_parallel_degree is {degree}, but"
    if not found:
        lists = "".join(f" {name} cannot be shared: {reason}." for name, reason in [*stay.items()][:1])
        raise PlanError(
            f"{asked} the model has no layer of {degree} experts or more that ranks can share: in stacked "
            'weights, as those of transformers 5 are, or in a ModuleList with "expert" in its name or in the '
            f"name of its class.{lists} Set it to 1, or tensor_parallel_degree in its place."
        )
    for reason, names in _by_reason(stay).items():
        _warn(names, reason)
    if not between.lengths:
        raise PlanError(
            f"{asked} a microbatch has {samples} sample{'s' * (samples != 1)}, and each rank takes some. "
            "Use larger batches, fewer microbatches or a smaller degree."
        )
    return found


def _refuse_without_sequences(trace: Trace, between: BetweenUnits, mesh: Mesh) -> None:
    values = (value.spec for value in trace.graph.values if not value.free)
    if any(isinstance(between.placement(spec.shape), Cut) for spec in values if len(spec.shape) > 2):
        return
    dim = between.dim
    assert dim is not None
    lengths = sorted({shape[dim] for shape in trace.batch_shapes if len(shape) > dim})
    asked, remedy = "sequence_parallel is true", "sequence_parallel to false"
    if mesh.context > 1:
        asked, remedy = f"context_parallel_degree is {mesh.context}", "context_parallel_degree to 1"
    raise PlanError(
        f"{asked}, but ranks cannot share sequences along dimension {dim}: it has "
        f"{', '.join(map(str, lengths)) or 'no'} entries in the tensors of the batch, and no tensor between "
        f"units has as many. Set sequence_dim to the dimension of the sequence, or {remedy}."
    )


def _units(model: nn.Module, trace: Trace, tails: Mapping[int, DividedTail]) -> Iterator[tuple[str, Unit]]:
    """The units that may be divided, each with the arguments of a call of its cost class.

    Args:
        model: that was traced.
        trace: of a microbatch.
        tails: operations that belong to units, by the nodes of these.
    """
    seen: set[str] = set()
    whole: dict[str, list[str]] = {}
    for number, node in enumerate(trace.graph.nodes):
        if node.kind != "unit" or node.name in seen:
            continue
        seen.add(node.name)
        module, sample = model.get_submodule(node.name), trace.samples[node.cost_class]
        args, kwargs = sample.structure.rebuild(sample.leaves)
        if next(module.parameters(), None) is None:
            continue
        if reason := _reason_to_stay(module, kwargs):
            whole.setdefault(reason, []).append(node.name)
        else:
            tail = tails.get(number)
            following = None if tail is None else partial(_run_of, tail, trace)
            yield node.name, Unit(module, args, kwargs, following=following)
    for reason, names in whole.items():
        _warn(names, reason)


def _shared(trace: Trace, model: nn.Module, divided: AbstractSet[int]) -> dict[str, frozenset[int]]:
    """Places of arguments that an earlier unit has taken, too: gradients are added up, and placed once.

    Args:
        trace: of a microbatch.
        model: that was traced.
        divided: ids of the parameters that are cut; other units place nothing.
    """
    found: dict[str, frozenset[int]] = {}
    taken: set[int] = set()
    for step in trace.steps:
        node = None if step.node is None else trace.graph.nodes[step.node]
        if node is None or node.kind != "unit" or node.name in found:
            continue
        if any(id(each) in divided for each in model.get_submodule(node.name).parameters()):
            found[node.name] = frozenset(position for position, value in step.reads if value in taken)
            taken.update(value for _, value in step.reads)
    return found


def _run_of(tail: DividedTail, trace: Trace, material: Material) -> TailRun:
    return TailRun(tail, trace, material.like)


def _reason_to_stay(module: nn.Module, kwargs: Mapping[str, object]) -> str:
    """Why each rank must have all of a unit's parameters; empty where none must."""
    if _leaves_dispatcher(module):
        return "its code is compiled or scripted"
    if has_backward_hooks(module):
        return "its gradients are hooked"
    if any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        return "replicas share its statistics"
    return "it reads attributes that others set" if FOUND in kwargs else ""


def _by_reason(kept_whole: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in kept_whole.items():
        names.setdefault(reason, []).append(name)
    return names


def _warn(names: Sequence[str], reason: str) -> None:
    shown = ", ".join(name or "the model" for name in names[:3])
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    log.warning("%s%s stays whole on all ranks: %s", shown, more, reason)


def _leaves_dispatcher(module: nn.Module) -> bool:
    inside = list(module.modules())
    scripted = any(type(each).__module__.startswith("torch.jit") for each in inside)
    return scripted or any(is_compiled(each) or calls_compiled(each) for each in inside)


def _kept_whole(model: nn.Module, graph: ModelGraph) -> dict[str, Placement]:
    """The parameters of which every rank needs all elements, by each of their names."""
    in_units = {name for unit in graph.units.values() for name in unit.parameters}
    between = {name for node in graph.nodes for name in node.parameters}
    between |= graph.parameters.keys() - in_units
    whole = {id(each) for name, each in model.named_parameters() if name in between or _is_hooked(each)}
    names = model.named_parameters(remove_duplicate=False)
    return {name: WHOLE for name, each in names if id(each) in whole}


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether the script has hooked the gradient of a parameter, and expects all of it."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


def _divided(
    unit: Unit, own: Mapping[str, Cut], shares: WorkShares, prices: Prices, between: BetweenUnits
) -> DividedUnit:
    """What a unit costs the busiest rank of the group, with these cuts of its parameters."""
    if not own and not between.cuts:
        return DividedUnit()
    inner, is_grid = between.inner_ranks, between.inner_ranks > 1
    degree = between.num_ranks * inner
    # Of a batch, or a sequence, the last ones have more.
    order = 1 if between.cuts else -1
    of_cuts = range(inner if is_grid else degree)
    busiest = max(of_cuts, key=lambda r: (sum(cut.length(r) for cut in own.values()), order * r))
    if is_grid:
        busiest += (between.num_ranks - 1) * inner
    whole = dry_run(unit, {}, rank=0, num_ranks=degree, prices=prices)
    part = dry_run(unit, own, rank=busiest, num_ranks=degree, prices=prices, between=between)
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


def _operations(trace: Trace, prices: Prices, between: BetweenUnits) -> Iterator[tuple[int, DividedUnit]]:
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
    share /= between.inner_ranks if between.cuts_again else 1
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


def _tell(graph: ModelGraph, cuts: Mapping[str, Cut], *, num_ranks: int) -> None:
    """Says once which units are divided in no part."""
    whole = [
        name
        for name, unit in graph.units.items()
        if any(not graph.parameters[each].is_buffer for each in unit.parameters)
        and not any(each in cuts for each in unit.parameters)
    ]
    if whole:
        shown = ", ".join(whole[:3]) + (f" and {len(whole) - 3} more" if len(whole) > 3 else "")
        log.info("%d ranks share no parameter of %s: each of them has all", num_ranks, shown)

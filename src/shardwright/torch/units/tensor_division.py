"""Divides the units of a trace over a tensor-parallel group, without running them.

::

    pin(layer.query, "weight", Pin(dim=0, block=head_size))      rows, whole heads
    pin(layer.dense, "weight", Pin(dim=1, block=head_size))      columns
    pinned_placements(model, num_ranks=2)                        name of a parameter -> placement

A pin names no rank, so that a module can be built, copied and pickled before anyone knows how many there are.

::

    trace ─► one call of each unit ─► search for placements ─► cuts ─► dry run of each kind ─► what it costs

Tensors between units are whole, or cut along the batch or the sequence, as the runtime has them. A unit stays
whole where its code may leave PyTorch's dispatcher. A parameter stays whole where code between units uses it,
or the script has hooked its gradient, or ranks share sequences alone.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import astuple, dataclass, replace

from torch import Tensor, nn

from shardwright.config import Config
from shardwright.errors import PlanError, UsageError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.placement import WHOLE, BetweenUnits, Cut, Placement
from shardwright.plan import TensorPrices
from shardwright.planner.division import DividedUnit, Division
from shardwright.text import shortened
from shardwright.torch.tensor_parallel.expert_list import reasons_to_stay
from shardwright.torch.tensor_parallel.experts import cuts_of_experts, run_own_experts
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search.search import find_placements
from shardwright.torch.tensor_parallel.search.unit import Unit
from shardwright.torch.tensor_parallel.search.ways import WorkShares
from shardwright.torch.tracing.divided_tail import DividedTail, divided_tails
from shardwright.torch.tracing.trace_data import Trace
from shardwright.torch.units.divided_costs import (
    PartTimer,
    by_reason,
    divided_operations,
    divided_units,
    divisible_units,
    observers_aside,
    parameters_kept_whole,
    shared_arguments,
    warn_of_whole,
)

_MARK = "_shardwright_pins"


@dataclass(frozen=True, slots=True)
class Pin:
    """Where a parameter is to be cut, for any number of ranks.

    Attributes:
        dim: the dimension; None keeps the parameter whole.
        block: so many slices stay together: the channels of a head.
    """

    dim: int | None
    block: int = 1

    def placement(self, shape: tuple[int, ...], *, num_ranks: int) -> Placement:
        """The placement of a parameter of this shape; whole, if there are fewer blocks than ranks.

        Example:
            >>> from shardwright.torch.units.tensor_division import Pin
            >>> str(Pin(dim=0, block=4).placement((12, 8), num_ranks=2))
            'cut 0 (r0:4 r1:8)'
        """
        if self.dim is None:
            return WHOLE
        num_blocks = shape[self.dim] // self.block
        if num_blocks < num_ranks:
            return WHOLE
        return Cut.even(self.dim, num_blocks, num_ranks=num_ranks).times(self.block)


def pin(module: nn.Module, name: str, where: Pin) -> None:
    """Pins a parameter of a module."""
    # No class of ours, so that a pickled module needs no shardwright.
    vars(module).setdefault(_MARK, {})[name] = astuple(where)


def pin_whole(module: nn.Module) -> None:
    """Keeps the own parameters of a module whole; those of its children are as they are."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            pin(module, name, Pin(dim=None))


def pinned_placements(model: nn.Module, *, num_ranks: int) -> dict[str, Placement]:
    """The placements of all pinned parameters; a tied one is there under each of its names.

    Where only one of its names is pinned to a cut, that counts.
    """
    chosen: dict[int, tuple[str, Placement]] = {}
    for prefix, module in model.named_modules():
        for key, (dim, block) in vars(module).get(_MARK, {}).items():
            parameter = module._parameters.get(key)
            if parameter is None:
                continue
            name = f"{prefix}.{key}" if prefix else key
            placement = _placement(name, parameter, Pin(dim, block), num_ranks)
            first, earlier = chosen.setdefault(id(parameter), (name, placement))
            if WHOLE not in (earlier, placement) and earlier != placement:
                raise UsageError(
                    f"{first} and {name} are one parameter, but are pinned as {earlier} and as {placement}. "
                    "Pin one of them."
                )
            if earlier == WHOLE:
                chosen[id(parameter)] = name, placement
    return {
        name: chosen[id(parameter)][1]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in chosen
    }


def _placement(name: str, parameter: Tensor, where: Pin, num_ranks: int) -> Placement:
    shape = tuple(parameter.shape)
    if where.dim is not None and (where.dim >= len(shape) or shape[where.dim] % where.block):
        raise UsageError(
            f"{name} has shape {shape}, which cannot be cut along dimension {where.dim} in blocks of "
            f"{where.block}."
        )
    return where.placement(shape, num_ranks=num_ranks)


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
    time_part: PartTimer | None = None,
) -> Division:
    """How ranks that share a batch compute the units of a trace, and what that costs them."""
    graph = trace.graph
    between, searched = _between(trace, config, mesh)
    experts: dict[str, Cut] = {}
    kept_whole = parameters_kept_whole(model, graph)
    if mesh.expert > 1:
        found_experts = _experts(model, trace, between, mesh)
        experts = {name: cut for name, cut in found_experts.items() if name not in kept_whole}
        run_own_experts(model)
    of_sequences = searched if min(mesh.expert, mesh.tensor) > 1 else between
    if of_sequences.cuts and (mesh.expert == 1 or mesh.inner is not None):
        _refuse_without_sequences(trace, of_sequences, mesh)
    tails = {} if between.cuts else divided_tails(trace)
    units = dict(divisible_units(model, trace, tails))
    shares_layers = mesh.tensor > 1
    # Who shares a batch wants it divided, however long a latency is.
    if decided_by is None:
        decided_by = prices if shares_layers else prices.model_copy(update={"latency_s": 0.0})
    own_prices = Prices(**decided_by.model_dump(), sums_wait=not shares_layers)
    # Each context rank has a part of the work, and of what ranks exchange that share layers.
    hooks_aside = observers_aside(trace, units.values())
    with hooks_aside():
        found = find_placements(
            units,
            num_ranks=searched.num_ranks,
            prices=_for_a_part(own_prices, mesh.share // mesh.tensor) if shares_layers else own_prices,
            optimize=config.goal_of_division,
            num_microbatches=microbatches,
            pinned={**_pinned(model, trace, mesh, experts), **kept_whole},
            between=searched,
        )
    for reason, names in by_reason(found.kept_whole).items():
        warn_of_whole(names, f"its code does not run on tensors without data ({reason})")
    of_tensor = _cuts_of_tensors(model, {**found.placements, **experts})
    if mesh.pipeline == 1 and not between.cuts:  # else stages have tensors of their own
        shared = shared_arguments(trace, model, of_tensor.keys())
        units = {name: replace(unit, shared=shared.get(name, frozenset())) for name, unit in units.items()}
    of_experts = _ids_of(model, experts) if mesh.inner is not None else set()
    with hooks_aside():
        shares = _shares_of_work(found.shares, units, of_experts, own_prices, between, mesh)
        divided = divided_units(
            units, found.kind_of, shares, of_tensor, of_experts, own_prices, between, time_part
        )
        operations, values = _outside_of_units(trace, tails, divided, own_prices, between)
    cuts = {name: of_tensor[id(each)] for name, each in model.named_parameters() if id(each) in of_tensor}
    if mesh.tensor > 1:
        _tell(graph, cuts, num_ranks=mesh.tensor)
    return Division(
        degree=mesh.share,
        samples=graph.batch_size,
        prices=prices,
        decided_by=decided_by,
        cuts=cuts,
        experts=frozenset() if mesh.inner is None else frozenset(experts).intersection(cuts),
        units=divided,
        operations=operations,
        values=values,
        between=between if between.cuts else None,
    )


def _cuts_of_tensors(model: nn.Module, placements: Mapping[str, Placement]) -> dict[int, Cut]:
    """The cuts of parameters, by the ids of these: a parameter may have several names."""
    by_any_name = dict(model.named_parameters(remove_duplicate=False))
    return {
        id(by_any_name[name]): placement
        for name, placement in placements.items()
        if isinstance(placement, Cut)
    }


def _ids_of(model: nn.Module, names: Iterable[str]) -> set[int]:
    by_any_name = dict(model.named_parameters(remove_duplicate=False))
    return {id(by_any_name[name]) for name in names}


def _outside_of_units(
    trace: Trace,
    tails: Mapping[int, DividedTail],
    divided: Mapping[str, DividedUnit],
    prices: Prices,
    between: BetweenUnits,
) -> tuple[dict[int, DividedUnit], dict[int, float]]:
    """What code between units costs each rank, by operation; and shares of values that are divided there."""
    operations = dict(divided_operations(trace, prices, between)) if between.cuts else {}
    values: dict[int, float] = {}
    for node, tail in tails.items():
        share = divided.get(trace.graph.nodes[node].name, DividedUnit()).inside_share
        values |= dict.fromkeys(tail.values, share)
        operations |= dict.fromkeys(tail.nodes, DividedUnit.of_share(share))
    return operations, values


def _between(trace: Trace, config: Config, mesh: Mesh) -> tuple[BetweenUnits, BetweenUnits]:
    """Where tensors between units are, and where they are for the search of how ranks share layers."""
    dim = config.between_units(mesh)
    shapes = trace.batch_shapes
    if mesh.inner is None:
        found = BetweenUnits.of_batch(shapes, dim, num_ranks=mesh.share)
        return found, found
    inner = config.cut_again(mesh)
    num_outer = mesh.share // mesh.inner_ranks
    both = BetweenUnits.of_batch(
        shapes, dim, num_ranks=num_outer, inner_ranks=mesh.inner_ranks, inner_dim=inner
    )
    return both, BetweenUnits.of_batch(shapes, inner, num_ranks=mesh.inner_ranks)


def _shares_of_work(
    shares: Mapping[str, WorkShares],
    units: Mapping[str, Unit],
    of_experts: Set[int],
    prices: Prices,
    between: BetweenUnits,
    mesh: Mesh,
) -> Mapping[str, WorkShares]:
    """Shares of the work of units, by the first unit of each kind; those of the search on a grid of ranks."""
    even = WorkShares(1 / mesh.share, 1 / mesh.share)
    if mesh.expert == 1:
        return _of_a_part(shares, units, prices, between) if between.inner_ranks > 1 else shares
    # The search sees experts' operations one by one, and not that each rank runs its own.
    if mesh.tensor == 1:
        return defaultdict(lambda: even)
    has_experts = {
        name for name, unit in units.items() if any(id(p) in of_experts for p in unit.module.parameters())
    }
    return {
        name: even
        if name in has_experts
        else WorkShares(each.forward / mesh.expert, each.backward / mesh.expert)
        for name, each in shares.items()
    }


def _of_a_part(
    shares: Mapping[str, WorkShares], units: Mapping[str, Unit], prices: Prices, between: BetweenUnits
) -> dict[str, WorkShares]:
    """Shares of the work of units, for the context rank with most of it."""
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
        between=replace(between, inner_ranks=1, inner_dim=None),
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


def _pinned(model: nn.Module, trace: Trace, mesh: Mesh, experts: Mapping[str, Cut]) -> dict[str, Placement]:
    """Placements that the search may not choose: those that somebody, or the settings, have chosen."""
    if mesh.tensor > 1:
        # Layers with too few experts for all ranks, too: each rank runs these as one.
        all_experts = {} if mesh.expert == 1 else cuts_of_experts(model, num_ranks=1, units=trace.unit_names)
        return {**pinned_placements(model, num_ranks=mesh.tensor), **dict.fromkeys(all_experts, WHOLE)}
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    # In a grid, experts are no matter of one axis.
    return {name: experts.get(name, WHOLE) if mesh.inner is None else WHOLE for name in names}


def _experts(model: nn.Module, trace: Trace, between: BetweenUnits, mesh: Mesh) -> dict[str, Cut]:
    """How ranks share the experts of a model: the cuts of parameters, by name."""
    degree, samples = mesh.share, trace.graph.batch_size
    found = cuts_of_experts(model, num_ranks=degree, units=trace.unit_names)
    stay = reasons_to_stay(model, num_ranks=degree, units=trace.unit_names)
    asked, remedy = (
        f"expert_parallel_degree is {mesh.expert}",
        "Set it to 1, or tensor_parallel_degree in its place.",
    )
    if mesh.inner is not None:
        other, of_other = ("tensor", mesh.tensor) if mesh.tensor > 1 else ("context", mesh.context)
        asked += f" and {other}_parallel_degree {of_other}"
        remedy = "Set one of them to 1, or both smaller: each rank has an expert."
    asked += ", but"
    if not found:
        lists = "".join(f" {name} cannot be shared: {reason}." for name, reason in [*stay.items()][:1])
        raise PlanError(
            f"{asked} the model has no layer of {degree} experts or more that ranks can share: in stacked "
            'weights, as those of transformers 5 are, or in a ModuleList with "expert" in its name or in the '
            f"name of its class.{lists} {remedy}"
        )
    for reason, names in by_reason(stay).items():
        warn_of_whole(names, reason)
    if not (between.inner_lengths if mesh.inner == "ep" else between.lengths):
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
        f"units has as many. Give the batch as samples x sequence, or set {remedy}."
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
        log.info("%d ranks share no parameter of %s: each of them has all", num_ranks, shortened(whole))

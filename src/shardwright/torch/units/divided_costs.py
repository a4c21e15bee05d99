"""Which units of a trace ranks may divide, and what divided ones cost the busiest rank.

A unit stays whole where its code may leave PyTorch's dispatcher. A parameter stays whole where code between
units uses it, or the script has hooked its gradient.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from collections.abc import Set as AbstractSet
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from torch import nn

from shardwright.model_graph import ModelGraph
from shardwright.placement import WHOLE, BetweenUnits, Cut, Placement
from shardwright.planner.division import DividedUnit, Passage
from shardwright.torch.counting.compiled_modules import HookEffects, calls_compiled, is_compiled
from shardwright.torch.interception.unit_attributes import FOUND
from shardwright.torch.python_state.shared_state import filled_copy
from shardwright.torch.pytorch.modules import has_backward_hooks
from shardwright.torch.tensor_parallel.group import Prices
from shardwright.torch.tensor_parallel.search.dry_run import (
    CutTensor,
    DryRun,
    Phase,
    dry_run,
    dry_run_of_operation,
)
from shardwright.torch.tensor_parallel.search.unit import Material, Unit, results_of
from shardwright.torch.tensor_parallel.search.ways import WorkShares
from shardwright.torch.tracing.divided_tail import DividedTail, TailRun
from shardwright.torch.tracing.trace_data import Sample, Trace

log = logging.getLogger(__name__)


def divisible_units(
    model: nn.Module, trace: Trace, tails: Mapping[int, DividedTail]
) -> Iterator[tuple[str, Unit]]:
    """The units that may be divided, each with the arguments of a call of its cost class."""
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
            behind = () if tail is None else (trace.graph.nodes[each].cost_class for each in tail.nodes)
            classes = (node.cost_class, *behind)
            yield (
                node.name,
                Unit(module, args, kwargs, following=following, cost_classes=classes, run=filled_copy),
            )
    for reason, names in whole.items():
        warn_of_whole(names, reason)


def observers_aside(trace: Trace, units: Iterable[Unit]) -> Callable[[], AbstractContextManager[None]]:
    """Makes contexts in which hooks that only look on do not see that units are run, and run for nothing.

    Units whose forward needs what such a hook leaves somewhere keep theirs.
    """
    hooks = next((sample.hooks for sample in trace.samples.values()), HookEffects())

    def runs_without(unit: Unit) -> bool:
        if not hooks.looks_on([unit.module]):
            return True
        try:
            with hooks.aside([unit.module]):
                results_of(unit.module, unit.args, unit.kwargs, run=unit.run)
        except Exception as error:
            log.debug("%s does not run without its hooks: %s", type(unit.module).__name__, error)
            return False
        return True

    modules = [unit.module for unit in units if runs_without(unit)]
    return partial(hooks.aside, modules)


def shared_arguments(trace: Trace, model: nn.Module, divided: AbstractSet[int]) -> dict[str, frozenset[int]]:
    """Places of arguments that an earlier unit has taken, too: gradients are added up, and placed once."""
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


def parameters_kept_whole(model: nn.Module, graph: ModelGraph) -> dict[str, Placement]:
    """The parameters of which every rank needs all elements, by each of their names."""
    in_units = {name for unit in graph.units.values() for name in unit.parameters}
    between = {name for node in graph.nodes for name in node.parameters}
    between |= graph.parameters.keys() - in_units
    whole = {id(each) for name, each in model.named_parameters() if name in between or _is_hooked(each)}
    names = model.named_parameters(remove_duplicate=False)
    return {name: WHOLE for name, each in names if id(each) in whole}


def by_reason(kept_whole: Mapping[str, str]) -> dict[str, list[str]]:
    names: dict[str, list[str]] = {}
    for name, reason in kept_whole.items():
        names.setdefault(reason, []).append(name)
    return names


def warn_of_whole(names: Sequence[str], reason: str) -> None:
    shown = ", ".join(name or "the model" for name in names[:3])
    more = f" (and {len(names) - 3} more)" if len(names) > 3 else ""
    log.warning("%s%s stays whole on all ranks: %s", shown, more, reason)


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


def _leaves_dispatcher(module: nn.Module) -> bool:
    inside = list(module.modules())
    scripted = any(type(each).__module__.startswith("torch.jit") for each in inside)
    return scripted or any(is_compiled(each) or calls_compiled(each) for each in inside)


def _is_hooked(parameter: nn.Parameter) -> bool:
    """Whether the script has hooked the gradient of a parameter, and expects all of it."""
    return bool(parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))


_MOST_PACE = 2.0
"""Beyond it a timing was disturbed, or a unit so small that nothing follows from it."""


@dataclass(frozen=True, slots=True)
class UnitPart:
    """What one rank has of a unit.

    Attributes:
        experts: those of them that all ranks of a grid share.
        rank, num_ranks: who has it, of all that share a batch.
    """

    unit: Unit
    cuts: Mapping[str, Cut]
    experts: Set[str]
    rank: int
    num_ranks: int
    prices: Prices
    between: BetweenUnits


PartTimer = Callable[[UnitPart, Phase, Phase], WorkShares | None]
"""Measures seconds of a part's own operations in forward and backward, over those of the whole unit."""


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

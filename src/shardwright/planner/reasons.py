"""Ranks options: by time and memory, and near the best by simplicity; the plan of the last run stays.

Predictions err. Two plans of one model err alike in most, so a simpler one is taken within the error of a
*comparison*. A plan that has run before stays within the error of a *prediction*: another one changes
microbatches and cuts, and with them results in their last bits.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod

from shardwright.config import Config
from shardwright.costs import calibration_of
from shardwright.model_graph import ModelGraph
from shardwright.plan import Alternative, MemoryPrediction, Plan
from shardwright.planner.cuts import nesting_of
from shardwright.planner.division import Division
from shardwright.planner.draft import Draft, Option
from shardwright.planner.profiles import MEASURED_ERROR, error_of
from shardwright.profile import Profile
from shardwright.quantities import counted, format_bytes, format_seconds

SIMPLICITY = ("1f1b", "gpipe", "zb_h1", "interleaved_1f1b", "zb_v")
"""Schedule families in the order of simplicity. 1F1B needs less memory than GPipe for the same time."""

_LEAST_ERROR = 0.01


def error_of_comparison(candidates: Iterable[tuple[ModelGraph, Profile]]) -> float:
    """The share by which two plans may differ by chance: half of the spread of a step's measured seconds.

    It is 1 % at least, and no more than the error of a prediction.
    """
    spread_s = whole_s = 0.0
    for graph, profile in candidates:
        for node in graph.nodes:
            cost = profile.costs.get(node.cost_class)
            if cost is not None and node.kind == "unit":
                seconds = cost.forward_s + cost.backward_s
                spread_s, whole_s = spread_s + seconds * cost.spread / 2, whole_s + seconds
    error = spread_s / whole_s if whole_s > 0 else 0.0
    return min(max(error, _LEAST_ERROR), MEASURED_ERROR)


def rank(
    options: Sequence[Option], *, memory_weight: float, near_tie: float = 1.0 + _LEAST_ERROR
) -> list[Option]:
    """The options, best first: by time (and memory, by its weight); near the best, the simplest.

    An option whose cuts fall between blocks is simpler than one whose cuts run through them.
    """
    score = _scores(options, memory_weight)

    def simplicity(option: Option) -> tuple[int, int, int, int, int]:
        layout = option.layout
        nesting = sum(nesting_of(layout.chain.labels, cut) for cut in layout.cuts[1:-1])
        recomputed = int(layout.recompute.sum())
        if layout.offload is not None:
            recomputed += int(layout.offload.sum())
        family = SIMPLICITY.index(option.kind)
        return nesting, layout.num_stages, family, recomputed, option.num_microbatches

    best = min(score(option) for option in options)
    near = [option for option in options if score(option) <= best * near_tie]
    far = [option for option in options if score(option) > best * near_tie]
    return sorted(near, key=lambda o: (simplicity(o), score(o))) + sorted(
        far, key=lambda o: (score(o), simplicity(o))
    )


def _scores(options: Sequence[Option], memory_weight: float) -> Callable[[Option], float]:
    """Rates an option by time and memory, each relative to the least of all."""
    least_s = min(option.step_s for option in options) or 1.0
    least_bytes = min(option.peak_bytes for option in options) or 1

    def score(option: Option) -> float:
        time, memory = option.step_s / least_s, option.peak_bytes / least_bytes
        return (1 - memory_weight) * time + memory_weight * memory

    return score


def kept_plan(
    best: Option, fitting: Sequence[Option], previous: Plan | None, *, memory_weight: float
) -> Option | None:
    """The option that the previous plan is, unless the best one is better by more than predictions err."""
    same = [option for option in fitting if is_of(previous, option)]
    if not same:
        return None
    error = error_of(best.layout.chain.provenance, best.workload.fabric.cluster.device)
    score = _scores(fitting, memory_weight)
    kept = min(same, key=score)
    return kept if score(kept) <= score(best) * (1.0 + error) else None


def is_of(plan: Plan | None, option: Option | Draft) -> bool:
    """Whether a plan has these stages, on these ranks, with this schedule."""
    if plan is None or plan.schedule.kind != option.kind:
        return False
    layout = option.layout
    return (
        plan.schedule.microbatches == option.workload.num_microbatches
        and plan.stage_ranks == layout.ranks
        and cuts_of(plan) == tuple(layout.cuts)
    )


def cuts_of(plan: Plan) -> tuple[int, ...]:
    """Positions of the calls at which the stages of a plan begin, and the number of calls."""
    return (0, *itertools.accumulate(len(stage.units) for stage in plan.stages))


_NUM_ALTERNATIVES = 5


def title(option: Option) -> str:
    """A name for an option: ``1f1b, 4 microbatches, 2 stages``."""
    layout = option.layout
    text = f"{option.kind}, {counted(option.num_microbatches, 'microbatch', 'es')}, "
    text += counted(layout.num_stages, "stage")
    if layout.num_stages > layout.num_ranks:
        text += f" on {layout.num_ranks} ranks"
    return text


def reasons(best: Option, *, others: Sequence[Option], config: Config) -> tuple[str, ...]:
    """The reasons for an option, its limits, and its basis; one sentence each."""
    found = [_choice(best, others), _balance(best), _memory(best)]
    found += _recomputation(best)
    found += _offload(best)
    found += _ties(best)
    found += _replicas(best)
    found += _sharing(best)
    found += _slow_hosts(best)
    if config.pins:
        pins = ", ".join(f"{key} {value}" for key, value in config.pins.items())
        found.append(f"Fixed by the settings: {pins}.")
    found.append(_times(best))
    return tuple(found)


def _times(best: Option) -> str:
    if best.layout.chain.provenance == "measured":
        return "The times of the units were measured."
    device = best.workload.fabric.cluster.device
    basis = f", {calibration_of(device.family).provenance}" if device.family else ""
    return (
        f"The times of the units are estimated from FLOPs and bytes{basis}: expect an error of 25% or more."
    )


def _slow_hosts(best: Option) -> list[str]:
    slowness = best.layout.slowness
    if len(set(slowness)) < 2:
        return []
    ratio = max(slowness) / min(slowness)
    slow = [str(rank) for rank, times in enumerate(slowness) if times == max(slowness)]
    who = f"Pipeline rank {slow[0]}" if len(slow) == 1 else f"Pipeline ranks {', '.join(slow)}"
    takes = "takes" if len(slow) == 1 else "take"
    return [f"{who} {takes} {ratio:.1f} times as long as the fastest for the same work, and less of it."]


def _replicas(best: Option) -> list[str]:
    sums, replicas = best.replica_s, best.workload.fabric.mesh.data
    if sums.total_s <= 0:
        return []
    hidden = f", {format_seconds(sums.hidden_s)} of it while ranks compute" if sums.hidden_s > 0 else ""
    return [
        f"Summing the gradients over {replicas} replicas takes {format_seconds(sums.total_s)} a step{hidden}."
    ]


def _sharing(best: Option) -> list[str]:
    degree = best.workload.fabric.mesh.shard
    if degree == 1:
        return []
    shared = max(shared for _, shared in best.layout.trained_bytes())
    found = [
        f"Each {degree} replicas share parameters, gradients and optimizer state: of {format_bytes(shared)} "
        f"of parameters a rank keeps {format_bytes(shared // degree)}."
    ]
    if best.layout.chain.reductions > 1:
        found.append(
            "Gradients of shared parameters are reduced in every microbatch: whole ones, added up over "
            f"{best.num_microbatches} of them, would take {format_bytes(shared)} more."
        )
    return found


def tensor_reasons(best: Option, *, division: Division | None, graph: ModelGraph) -> list[str]:
    """What ranks that share layers have of the model, and what they exchange for it; on the busiest rank."""
    if division is None:
        return []
    elements = {n: prod(p.spec.shape) for n, p in graph.parameters.items() if not p.is_buffer}
    layout = best.layout
    exchanges = [layout.exchange(stage) for stage in range(layout.num_stages)]
    seconds = [each["forward_exchange_s"] + each["backward_exchange_s"] for each in exchanges]
    busiest = max(range(layout.num_ranks), key=lambda rank: sum(seconds[s] for s in layout.stages_of(rank)))
    stages = layout.stages_of(busiest)
    num_bytes = sum(exchanges[stage]["exchange_bytes"] for stage in stages)
    found = [
        f"Each {division.degree} ranks share {_shared(division, elements)}. For a microbatch, a rank sends "
        f"{format_bytes(num_bytes)} to the others, in "
        f"{format_seconds(sum(seconds[stage] for stage in stages))}."
    ]
    if best.settling_s > 0:
        found.append(
            "Gradients of parameters that each of them has whole are summed once a step, in "
            f"{format_seconds(best.settling_s)}."
        )
    return found


def _shared(division: Division, elements: Mapping[str, int]) -> str:
    """What ranks share."""

    def percent(names: Collection[str]) -> str:
        own = sum(size for name, size in elements.items() if name in names)
        return f"{own / max(sum(elements.values()), 1):.0%}"

    if division.experts:
        others = division.cuts.keys() - division.experts
        beside = f"layers, {percent(others)}, and samples" if others else "sequences and samples"
        return f"the experts, {percent(division.experts)} of the parameters, {beside}"
    if division.between is not None and division.between.dim == 0 and division.cuts:
        return f"the experts, {percent(division.cuts)} of the parameters, and samples"
    if division.between is None or division.cuts:
        return f"layers: {percent(division.cuts)} of the parameters are divided"
    return "sequences: each has all parameters, and a part of what flows between units"


def alternatives(best: Option, *, others: Sequence[Option]) -> tuple[Alternative, ...]:
    """The best of the other options, one for each family, number of microbatches and number of stages."""
    found: dict[tuple[str, int, int], Alternative] = {}
    for option in others:
        key = (option.kind, option.num_microbatches, option.layout.num_stages)
        if key == (best.kind, best.num_microbatches, best.layout.num_stages) or key in found:
            continue
        found[key] = Alternative(
            schedule=option.kind,
            microbatches=option.num_microbatches,
            stages=option.layout.num_stages,
            step_s=option.step_s,
            peak_bytes=option.peak_bytes,
            verdict=_verdict(option, best),
        )
    of_family: dict[str, int] = {}
    places = []
    for alternative in found.values():
        places.append(of_family.get(alternative.schedule, 0))
        of_family[alternative.schedule] = places[-1] + 1
    ordered = sorted(zip(places, found.values(), strict=True), key=lambda row: row[0])
    return tuple(alternative for _, alternative in ordered)[:_NUM_ALTERNATIVES]


def describe_memory(memory: MemoryPrediction) -> str:
    """The parts of a peak, largest first: ``1.2 GiB activations, 400 MiB parameters``."""
    parts = {
        "parameters": memory.parameters_bytes,
        "gradients": memory.gradients_bytes,
        "optimizer state": memory.optimizer_bytes,
        "activations": memory.activations_bytes,
        "batch": memory.batch_bytes,
        "work": memory.work_bytes,
    }
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{format_bytes(size)} {name}" for name, size in ordered if size)


def _choice(best: Option, others: Sequence[Option]) -> str:
    text = f"Chosen: {title(best)}, {format_seconds(best.step_s)} a step"
    rivals = [o for o in others if o.fits and title(o) != title(best)]
    if not rivals:
        alone = [o for o in others if not o.fits]
        return text + (f"; none of {len(alone)} others that were tried fits." if alone else ".")
    rival = min(rivals, key=lambda option: option.step_s)
    text += f"; the next best, {title(rival)}, takes {format_seconds(rival.step_s)}"
    difference = rival.step_s / best.step_s - 1
    if difference > 0:
        return f"{text} (+{difference:.1%})."
    less = f"{-difference:.1%} less" if difference < -5e-4 else "as much"
    if best.workload.demands.memory_weight == 0:
        drawback = (
            "keeps the activations of all microbatches" if rival.kind == "gpipe" else "is more complicated"
        )
        return f"{text}, {less}, but {drawback}."
    return f"{text}, {less}, but needs {format_bytes(rival.peak_bytes)}, not {format_bytes(best.peak_bytes)}."


def _balance(best: Option) -> str:
    costs = best.layout.stage_costs()
    work = [
        sum(costs[action.stage].seconds(action.kind) for action in row if action.is_compute)
        / best.num_microbatches
        for row in best.schedule.actions
    ]
    slowest = work.index(max(work))
    text = (
        f"Busiest rank: {slowest}, with {format_seconds(work[slowest])} of work a microbatch; "
        f"the mean is {format_seconds(sum(work) / len(work))}"
    )
    return text + f", and ranks idle {best.simulation.bubble:.0%} of the step."


def _memory(best: Option) -> str:
    neediest = max(range(len(best.memory)), key=lambda rank: best.memory[rank].peak_bytes)
    memory = best.memory[neediest]
    limit = best.workload.demands.limit_bytes
    bound = f"of {format_bytes(limit)}" if limit else "(no limit is known)"
    peak = format_bytes(memory.peak_bytes)
    return f"Peak memory (rank {neediest}): {peak} {bound}: {describe_memory(memory)}."


def _recomputation(best: Option) -> list[str]:
    layout = best.layout
    number = int(layout.recompute.sum())
    if not number:
        return []
    seconds = float(layout.chain.column("recompute_s")[layout.recompute].sum())
    text = (
        f"{number} of {layout.chain.num_calls} units are recomputed in the backward, "
        f"{format_seconds(seconds)} a microbatch"
    )
    if best.workload.demands.recompute == "full":
        return [text + ", because activation_checkpointing is full."]
    return [text + f": without it, {format_bytes(best.workload.demands.limit_bytes)} would not be enough."]


def _offload(best: Option) -> list[str]:
    layout, m = best.layout, best.num_microbatches
    if not layout.offloads:
        return []
    assert layout.offload is not None
    number, costs = int(layout.offload.sum()), layout.stage_costs()
    moved = sum(cost.offload_bytes for cost in costs)
    text = f"{number} of {layout.chain.num_calls} units offload {format_bytes(moved)} of a microbatch"
    host = best.workload.fabric.host
    if host is not None:
        taken_s = max(
            m * sum(2 * costs[stage].offload_bytes for stage in layout.stages_of(rank)) / host.bandwidth_Bps
            for rank in range(layout.num_ranks)
        )
        text += (
            f" and get it back, at {format_bytes(int(host.bandwidth_Bps))}/s: "
            f"{format_seconds(taken_s)} of copies a step beside computing"
        )
    if best.workload.demands.offload is True:
        return [text + ", because offload_activations is true."]
    return [text + f": without it, {format_bytes(best.workload.demands.limit_bytes)} would not be enough."]


def _ties(best: Option) -> list[str]:
    layout = best.layout
    found = []
    shared = layout.replicated()
    uses = [use for use in layout.chain.parameters if use.name in shared]
    if uses:
        largest = max(uses, key=lambda use: use.num_bytes)
        held = sorted({layout.ranks[stage] for stage in shared[largest.name]})
        between = largest.calls[-1] - largest.calls[0] + 1
        found.append(
            f"{largest.name}{f' and {len(uses) - 1} more' if len(uses) > 1 else ''} is held by ranks "
            f"{', '.join(map(str, held))}: summing the gradients takes {format_seconds(best.tie_s)} a step. "
            f"On one rank, it would take all {between} units from its first to its last use along."
        )
    for group in layout.chain.uncontracted().ties():
        ranks = {layout.ranks[layout.stage_of_call[call]] for use in group for call in use.calls}
        if len(ranks) == 1 and len(best.workload.fabric.mesh.group("pp", 0)) > 1:
            found.append(f"{group[0].name} is used by several units, all on rank {min(ranks)}.")
    return found


def _verdict(option: Option, best: Option) -> str:
    if not option.fits:
        neediest = max(range(len(option.memory)), key=lambda rank: option.memory[rank].peak_bytes)
        return (
            f"does not fit: rank {neediest} needs {format_bytes(option.peak_bytes)}, "
            f"{format_bytes(option.overflow_bytes)} too much"
        )
    difference = option.step_s / best.step_s - 1
    memory = format_bytes(option.peak_bytes)
    if difference < 0:
        return f"{-difference:.1%} faster, with {memory}: not enough to be worth its complication"
    return f"{difference:.1%} slower, with {memory}"

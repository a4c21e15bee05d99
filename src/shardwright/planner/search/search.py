"""Searches for the best plan of a profiled model on given machines.

::

    for each m:  graph, profile ─► chain ─► drafts: schedule family x stages per rank x ties x exposure
                                               │  closed form: keep the best dozen, and the best of each
                                               family ▼
                                            options: simulated with their real schedule
                                               │  drop what does not fit; near ties go to the simplest,
                                               │  and the previous plan stays within the error
                                               ▼
                                             plan: prediction, reasons, runners-up

The search is deterministic: ranks that plan separately reach the same plan.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import MeshPlan, Plan, SchedulePlan, StagePlan, identity
from shardwright.planner.chain.batch_statistics import count_groups, statistics_reasons
from shardwright.planner.chain.bonds import Bond
from shardwright.planner.chain.chain import Chain
from shardwright.planner.chain.division import Division
from shardwright.planner.chain.model_chain import build_chain
from shardwright.planner.machines.fabric import Fabric
from shardwright.planner.machines.past_runs import NO_CORRECTION, Correction
from shardwright.planner.memory.sharing import Sharing
from shardwright.planner.partition.blocks import on_boundaries
from shardwright.planner.partition.cuts import manual_stages
from shardwright.planner.partition.objective import OffloadPolicy
from shardwright.planner.search.infeasible import infeasible
from shardwright.planner.search.option import Demands, Draft, Option, Workload
from shardwright.planner.search.prediction import predict
from shardwright.planner.search.ranking import (
    SIMPLICITY,
    cuts_of,
    error_of_comparison,
    is_of,
    kept_plan,
    rank,
)
from shardwright.planner.search.reasons import alternatives, reasons, tensor_reasons
from shardwright.planner.search.refine import refine
from shardwright.profile import Profile
from shardwright.schedule import place_stages

__all__ = ["Candidates", "make_plan", "microbatch_counts", "schedule_families", "too_few_samples"]

Candidates = Mapping[int, tuple[ModelGraph, Profile]]
"""For each number of microbatches, the graph traced at that microbatch size and its profile."""

_NUM_SIMULATED = 12
_FEWEST_SIMULATED = 2
_NUM_REFINED = 4
_MOST_ACTIONS = 200_000
_MOST_TIES = 2
_MOST_BONDS = 3


def microbatch_counts(batch_size: int, *, config: Config, pipeline: int) -> tuple[int, ...]:
    """Into how many microbatches a batch could be split: what to trace and profile for `make_plan`.

    Args:
        batch_size: samples in a batch of one replica.
        config: a pinned number of microbatches is the only one.
        pipeline: pipeline ranks.

    Raises:
        PlanError: there is no sample, or more microbatches are pinned than there are samples.

    >>> microbatch_counts(32, config=Config(), pipeline=4)
    (4, 8, 16, 32)
    >>> microbatch_counts(32, config=Config(batch_statistics="batch"), pipeline=4)
    (1, 4, 8, 16, 32)
    """
    if batch_size < 1:
        raise PlanError("the batch is empty: it has no samples along its axis.")
    if config.microbatches is not None:
        if config.microbatches > batch_size:
            raise PlanError(too_few_samples("a batch of a replica", batch_size, config.microbatches))
        return (config.microbatches,)
    divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
    found = {1} if config.batch_statistics == "batch" else set()
    for wanted in (pipeline, 2 * pipeline, 4 * pipeline, 8 * pipeline):
        # Equal microbatches waste nothing: take the nearest divisor, unless none is near.
        nearest = min(divisors, key=lambda d: (max(d / wanted, wanted / d), d))
        near = max(nearest / wanted, wanted / nearest) <= 1.5
        found.add(nearest if near else min(wanted, batch_size))
    return tuple(sorted(found))


def too_few_samples(batch: str, num_samples: int, microbatches: int) -> str:
    """The error for a batch without one sample per microbatch, and the remedy.

    >>> too_few_samples("the batch", 1, 2)[:77]
    'the batch has 1 sample, but microbatches is 2: each needs at least one sample'
    """
    samples, most = f"{num_samples} samples", f"at most {num_samples}"
    if num_samples == 1:
        samples, most = "1 sample", "1"
    return (
        f"{batch} has {samples}, but microbatches is {microbatches}: each needs at least one sample. Use "
        f"batches of {microbatches} or more, or set microbatches to {most}."
    )


def make_plan(
    candidates: Candidates,
    *,
    cluster: Cluster,
    config: Config,
    mesh: Mesh,
    placement: Mapping[str, int] | None = None,
    optimizer_factor: float = 2.0,
    correction: Correction = NO_CORRECTION,
    division: Division | None = None,
    previous: Plan | None = None,
) -> Plan:
    """Chooses microbatches, schedule, stages and recomputation.

    Args:
        candidates: for each number of microbatches, the graph traced at that size and its profile.
        cluster: the machines.
        config: what differs from its default is kept.
        mesh: the grid of ranks.
        placement: pipeline rank of units that the user placed, by name; heeded where `auto_partition` is off.
        optimizer_factor: bytes of optimizer state for each byte of a trained parameter; Adam has 2.
        correction: what earlier runs on the machines say about predictions.
        division: how ranks along the tensor axis share the model; None where that has one rank.
        previous: the plan of the last run; it stays unless another is faster by more than predictions err.

    Raises:
        InfeasiblePlanError: nothing fits in memory; the message says what is missing and what would help.
        PlanError: the settings cannot be met, for example with more stages than units.
    """
    if division is not None and not division.cuts and mesh.tensor != config.tensor_parallel_degree:
        raise PlanError(
            f"{mesh.tensor} ranks that share layers would each compute all of them: on these machines, what "
            "they would exchange takes longer. Set tensor_parallel_degree to have them all the same."
        )
    chosen = _chosen_counts(candidates, config)
    fabric = Fabric(cluster=cluster, mesh=mesh, correction=correction)
    demands = Demands(
        limit_bytes=config.memory_limit or cluster.device.memory_bytes,
        memory_weight=config.balance_weight,
        recompute=config.activation_checkpointing,
        offload=_may_offload(config, cluster),
        horizon=config.activation_loading_horizon,
        active_microbatches=config.active_microbatches,
        optimizer_factor=optimizer_factor,
    )
    options: list[Option] = []
    groups = count_groups(candidates, chosen, config=config)
    for counts in groups:
        drafts: list[Draft] = []
        for m in counts:
            chain = build_chain(*candidates[m], division)
            drafts += _drafts(
                chain, m, placement or {}, config=config, fabric=fabric, demands=demands, previous=previous
            )
        options += [draft.work_out() for draft in _promising(drafts, previous)]
        if any(option.fits for option in options):
            break
    else:
        raise infeasible(options, config=config)
    if config.auto_partition and demands.memory_weight == 0:
        options = _on_boundaries(_refined(options, previous))
    near_tie = 1.0 + error_of_comparison(candidates[m] for m in counts)
    fitting = [option for option in options if option.fits]
    best, *_ = rank(fitting, memory_weight=demands.memory_weight, near_tie=near_tie)
    kept = kept_plan(best, fitting, previous, memory_weight=demands.memory_weight)
    stays = kept is not None and kept is not best
    best = kept or best
    graph, _ = candidates[best.num_microbatches]
    plan = _plan(best, graph=graph, config=config, mesh=mesh, options=options, division=division)
    notes = [
        *(["It is that of the last run: no other is faster by more than predictions err."] if stays else []),
        *tensor_reasons(best, division=division, graph=graph),
        *statistics_reasons(candidates, best.num_microbatches, config=config, group=groups.index(counts)),
    ]
    return plan.model_copy(update={"why": (*plan.why, *notes)}) if notes else plan


def _may_offload(config: Config, cluster: Cluster) -> OffloadPolicy:
    """As the settings say; where they leave it open, only where it is known what it costs."""
    wanted = config.offload_activations
    return False if wanted == "auto" and cluster.host is None else wanted


def _chosen_counts(candidates: Candidates, config: Config) -> list[int]:
    if not candidates:
        raise PlanError("there is nothing to plan: no number of microbatches was traced.")
    if config.microbatches is None:
        return sorted(candidates)
    if config.microbatches not in candidates:
        traced = ", ".join(map(str, sorted(candidates)))
        raise PlanError(
            f"microbatches is {config.microbatches}, but the model was traced for {traced} only. "
            f"Trace it for {config.microbatches} too."
        )
    return [config.microbatches]


def schedule_families(config: Config, *, pipeline: int) -> Iterator[tuple[str, int]]:
    """Schedule families and stages per rank that the settings allow."""
    pinned = config.virtual_stages
    if config.pipeline != "auto":
        kinds: Sequence[str] = (config.pipeline,)
    elif pipeline == 1 and pinned in (None, 1):
        # One stage runs its microbatches one by one, whatever the family; this one keeps the fewest
        # activations.
        kinds = ("1f1b",)
    else:
        kinds = SIMPLICITY
    for kind in kinds:
        if kind == "interleaved_1f1b":
            yield from ((kind, v) for v in ((2, 3, 4) if pinned is None else (pinned,)))
        elif kind == "zb_v":
            yield from ((kind, 2) for _ in range(pinned in (None, 2)))
        elif pinned in (None, 1):
            yield kind, 1


def _drafts(
    chain: Chain,
    m: int,
    placement: Mapping[str, int],
    *,
    config: Config,
    fabric: Fabric,
    demands: Demands,
    previous: Plan | None,
) -> list[Draft]:
    """Drafts with m microbatches, sharing parameters in a way that has room, the fastest first."""
    drafts: list[Draft] = []
    for sharing in Sharing.ways(config, fabric.mesh, fabric.cluster, num_microbatches=m):
        shared = sharing.applied(chain)
        if config.auto_partition:
            drafts += _automatic(shared, m, config=config, fabric=fabric, demands=demands)
            drafts += _again(previous, shared, m, config=config, fabric=fabric, demands=demands)
        else:
            drafts += _manual(shared, m, placement, config=config, fabric=fabric, demands=demands)
        if any(draft.overflow_bytes <= 0 and not draft.keeps_less for draft in drafts):
            break  # taking less memory would spare nothing
    return drafts


def _automatic(chain: Chain, m: int, *, config: Config, fabric: Fabric, demands: Demands) -> Iterator[Draft]:
    pipeline = fabric.mesh.pipeline
    families = list(schedule_families(config, pipeline=pipeline))
    least = min(v for _, v in families)
    fewest, bound = pipeline * least, chain.bound(stages_per_rank=least)
    if fewest > bound.num_atoms:
        raise PlanError(_too_many_stages(bound, pipeline, least))
    for variant in _tie_variants(bound, fewest):
        one, several = (variant.bound(stages_per_rank=v) for v in (1, 2))
        plain = interleaved = Workload(one, num_microbatches=m, fabric=fabric, demands=demands)
        if several.starts != one.starts:
            interleaved = Workload(several, num_microbatches=m, fabric=fabric, demands=demands)
        for kind, v in families:
            workload = plain if v == 1 else interleaved
            if pipeline * v > workload.chain.num_atoms:
                continue
            ranks = place_stages(kind, num_ranks=pipeline, stages_per_rank=v)
            # With few units, or several stages a rank, hosts that differ little are best cut as if alike.
            by_speed = (True, False) if fabric.slowness else (True,)
            seen: set[tuple[int, ...]] = set()
            for exposed, heeds_speed in itertools.product((1.0, 0.0), by_speed):
                draft = workload.draft(kind, ranks, exposed=exposed, heeds_speed=heeds_speed)
                if draft.layout.cuts not in seen:
                    seen.add(draft.layout.cuts)
                    yield draft


def _again(
    previous: Plan | None, chain: Chain, m: int, *, config: Config, fabric: Fabric, demands: Demands
) -> Iterator[Draft]:
    """The previous plan, if it is one for this chain, these ranks and settings."""
    if previous is None or previous.schedule.microbatches != m or previous.model.units != chain.labels:
        return
    pipeline, ranks = fabric.mesh.pipeline, previous.stage_ranks
    families = set(schedule_families(config, pipeline=pipeline))
    if previous.mesh.pipeline != pipeline or (previous.schedule.kind, len(ranks) // pipeline) not in families:
        return
    bound = chain.bound(stages_per_rank=len(ranks) // pipeline)
    cuts = cuts_of(previous)
    if set(cuts) <= set(bound.starts):
        workload = Workload(bound, num_microbatches=m, fabric=fabric, demands=demands)
        yield workload.draft(previous.schedule.kind, ranks, cuts=cuts)


def _tie_variants(chain: Chain, num_stages: int) -> Iterator[Chain]:
    """The chain, and the chain with the largest ties each kept on one rank with all that lies between."""
    yield chain
    for group in chain.ties()[:_MOST_TIES]:
        calls = [call for use in group for call in use.calls]
        contracted = chain.contract([(min(calls), max(calls))])
        if contracted.num_atoms >= num_stages:
            yield contracted


def _manual(
    chain: Chain, m: int, placement: Mapping[str, int], *, config: Config, fabric: Fabric, demands: Demands
) -> Iterator[Draft]:
    pipeline = fabric.mesh.pipeline
    default = config.default_partition or 0
    of_call = [placement.get(label.split("#")[0], default) for label in chain.labels]
    cuts, ranks = manual_stages(of_call, num_ranks=pipeline)
    # One module has one place, so calls that must stay together do, wherever the cuts are.
    workload = Workload(chain.uncontracted(), num_microbatches=m, fabric=fabric, demands=demands)
    kinds = (config.pipeline,) if config.pipeline != "auto" else ("1f1b", "gpipe", "zb_h1")
    for kind in kinds:
        yield workload.draft(kind, ranks, cuts=cuts)


def _promising(drafts: Sequence[Draft], previous: Plan | None) -> list[Draft]:
    """The dozen with the best closed-form time among those that fit, the best of each family, the previous.

    Fewer, where simulating them would take many seconds.
    """
    ranked = sorted(
        enumerate(drafts), key=lambda row: (max(0, row[1].overflow_bytes), row[1].estimate_s, row[0])
    )
    kept = [draft for _, draft in ranked[:_NUM_SIMULATED]]
    for kind in SIMPLICITY:
        if not any(draft.kind == kind for draft in kept):
            kept += [draft for _, draft in ranked if draft.kind == kind][:1]
    kept += [draft for draft in drafts if is_of(previous, draft) and all(draft is not each for each in kept)]
    budget = _MOST_ACTIONS
    affordable: list[Draft] = []
    for draft in kept:
        budget -= 3 * draft.layout.num_stages * draft.workload.num_microbatches
        if budget >= 0 or len(affordable) < _FEWEST_SIMULATED:
            affordable.append(draft)
    return affordable


def _refined(options: Sequence[Option], previous: Plan | None) -> list[Option]:
    """The options, the best few of them with their cuts moved to where the simulated step is shortest.

    The previous plan stays among them as it was: to replace it takes more than a shorter step.
    """
    best = rank([option for option in options if option.fits], memory_weight=0.0)[:_NUM_REFINED]
    better = {id(option): refine(option, max_actions=_MOST_ACTIONS // 4) for option in best}
    moved = [better.get(id(option), option) for option in options]
    kept = [option for option in best if is_of(previous, option) and better[id(option)] is not option]
    return [*moved, *kept]


def _on_boundaries(options: Sequence[Option]) -> list[Option]:
    """The options, and the best few with the cuts that run through blocks moved to their boundaries."""
    best = rank([option for option in options if option.fits], memory_weight=0.0)[:_NUM_REFINED]
    moved: dict[tuple[str, int, tuple[int, ...]], Option] = {}
    for option in best:
        chain, workload = option.workload.chain, option.workload
        seconds = (chain.column("forward_s") + chain.column("backward_s")).tolist()
        cuts = on_boundaries(option.layout.cuts, chain.labels, seconds, chain.starts)
        if cuts is not None and (key := (option.kind, option.num_microbatches, cuts)) not in moved:
            moved[key] = workload.draft(option.kind, option.layout.ranks, cuts=cuts).work_out()
    return [*options, *moved.values()]


def _too_many_stages(chain: Chain, pipeline: int, stages_per_rank: int) -> str:
    fit = chain.num_atoms
    per_rank = "" if stages_per_rank == 1 else f", {stages_per_rank} a rank"
    fewer = "" if stages_per_rank == 1 else "lower virtual_stages, take another pipeline, "
    merged, instead = "", "use a model with more, smaller blocks."
    if chain.num_calls > fit:
        bonds = _longest_bonds(chain, stages_per_rank)[:_MOST_BONDS]
        texts = [f"{chain.labels[b.first]} to {chain.labels[b.last]} for {b.reason}" for b in bonds]
        merged = f" ({chain.num_calls} unit calls, of which some must share a stage: {'; '.join(texts)})"
        instead = f"change the model: {bonds[0].remedy}"
    return (
        f"{pipeline} pipeline ranks need at least {pipeline * stages_per_rank} stages{per_rank}, but the "
        f"model has {fit} units to place{merged}. Use at most {fit} stages: {fewer}start fewer ranks, or "
        f"let them train replicas by a smaller pipeline_parallel_degree. Or {instead}"
    )


def _longest_bonds(chain: Chain, stages_per_rank: int) -> list[Bond]:
    """The bonds with the longest reach first; a bond inside of another is left out."""
    found: list[Bond] = []
    for bond in sorted(chain.bonds, key=lambda bond: bond.first - bond.last):
        inside = any(other.first <= bond.first and bond.last <= other.last for other in found)
        if not inside and (stages_per_rank > 1 or not bond.one_rank):
            found.append(bond)
    return found


def _plan(
    best: Option,
    *,
    graph: ModelGraph,
    config: Config,
    mesh: Mesh,
    options: Sequence[Option],
    division: Division | None,
) -> Plan:
    layout = best.layout
    labels = layout.chain.labels
    offload = [False] * len(labels) if layout.offload is None else layout.offload.tolist()
    stages = tuple(
        StagePlan(
            rank=layout.ranks[stage],
            units=tuple(labels[call] for call in layout.calls(stage)),
            recompute=tuple(labels[call] for call in layout.calls(stage) if layout.recompute[call]),
            offload=tuple(labels[call] for call in layout.calls(stage) if offload[call]),
        )
        for stage in range(layout.num_stages)
    )
    others = (
        rank([option for option in options if option is not best], memory_weight=0.0)
        if len(options) > 1
        else []
    )
    return Plan(
        model=identity(graph),
        mesh=MeshPlan(
            pipeline=mesh.pipeline,
            data=mesh.data,
            shard=mesh.shard,
            tensor=mesh.tensor,
            context=mesh.context,
            expert=mesh.expert,
            placement_strategy=mesh.placement,
        ),
        schedule=SchedulePlan(
            kind=best.kind,  # type: ignore[arg-type]
            microbatches=best.num_microbatches,
            active_microbatches=config.active_microbatches,
            reduce_every_microbatch=layout.chain.reductions > 1,
        ),
        stages=stages,
        replicated=layout.replicated(),
        tensor=None if division is None else division.plan_of(graph),
        prediction=predict(best),
        why=reasons(best, others=others, config=config),
        alternatives=alternatives(best, others=others),
        pins=config.pins,
    )

"""Searches for the best plan of a profiled model on given machines; where nothing fits, says what would help.

::

    for each m:  graph, profile ─► chain ─► drafts: schedule family x stages per rank x ties x exposure
                                               │  closed form: the best dozen, the best of each family
                                               ▼
                                            options: simulated with their real schedule
                                               │  drop what does not fit; near ties go to the simplest;
                                               │  the previous plan stays within the error, else cuts of
                                               │  the best few are moved
                                               ▼
                                             plan: prediction, reasons, runners-up

The search is deterministic: ranks that plan separately reach the same plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError, PlanError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner.cuts import on_boundaries
from shardwright.planner.division import Division
from shardwright.planner.draft import Draft, Option, make_draft
from shardwright.planner.drafts import drafts_of, refine, seconds_without_pipeline
from shardwright.planner.fabric import Fabric
from shardwright.planner.model_chain import build_chain
from shardwright.planner.objective import Demands, OffloadPolicy, RecomputePolicy
from shardwright.planner.option_plan import plan_of
from shardwright.planner.profiles import count_groups, statistics_reasons
from shardwright.planner.reasons import (
    SIMPLICITY,
    describe_memory,
    error_of_comparison,
    is_of,
    kept_plan,
    rank,
    tensor_reasons,
    title,
)
from shardwright.planner.workload import Workload
from shardwright.profile import Profile
from shardwright.quantities import format_bytes
from shardwright.schedule import place_stages

_FACTORS = (2, 4, 8, 16, 32, 64)
_MOST_RANKS = 64


def infeasible(options: Sequence[Option], *, config: Config) -> InfeasiblePlanError:
    """The error that tells what came closest and what would help."""
    best = min(options, key=lambda option: (option.overflow_bytes, option.step_s))
    neediest = max(range(len(best.memory)), key=lambda rank: best.memory[rank].peak_bytes)
    limit = best.workload.demands.limit_bytes
    lines = [
        f"nothing fits in {format_bytes(limit)} a rank. The closest of {len(options)} combinations tried "
        f"({title(best)}) needs {format_bytes(best.peak_bytes)} on rank {neediest}, "
        f"{format_bytes(best.overflow_bytes)} too much: {describe_memory(best.memory[neediest])}.",
        "What would help:",
    ]
    return InfeasiblePlanError("\n  ".join([*lines, *_remedies(best, config)]))


def _remedies(best: Option, config: Config) -> list[str]:
    found = []
    workload, ranks = best.workload, best.layout.num_ranks
    found += _keeping_less(best, config)
    if not config.auto_partition and _fits(best, config, automatic=True):
        found.append("Let the planner place the units: set auto_partition to true.")
    factor = next((f for f in _FACTORS if _fits(best, config, factor=f)), None)
    if factor is not None:
        found.append(
            f"Smaller microbatches: set microbatches to {best.num_microbatches * factor} "
            f"(now {best.num_microbatches}), if a batch has as many samples."
        )
    more = range(ranks + 1, min(_MOST_RANKS, workload.chain.num_atoms) + 1)
    number = (
        next((n for n in more if _fits(best, config, num_ranks=n)), None) if config.auto_partition else None
    )
    if number is not None:
        found.append(
            f"More ranks: set pipeline_parallel_degree to {number} (now {ranks}), "
            f"and start {number * workload.fabric.mesh.data}."
        )
    found.append(f"More memory: {format_bytes(best.peak_bytes)} a rank.")
    return found


def _keeping_less(best: Option, config: Config) -> list[str]:
    """What units could keep less of, if the settings let them; both at once only where neither suffices."""
    demands = best.workload.demands
    again = 'Recompute activations: set activation_checkpointing to "auto".'
    away = 'Offload activations: set offload_activations to "auto".'
    found = []
    if demands.recompute == "none" and _fits(best, config, recompute="auto"):
        found.append(again)
    if demands.offload is False and _fits(best, config, offload="auto"):
        found.append(away)
    may_both = demands.recompute == "none" and demands.offload is False
    if may_both and not found and _fits(best, config, recompute="auto", offload="auto"):
        found.append(f'{again.removesuffix(".")}, and offload_activations to "auto".')
    return found


def _fits(
    best: Option,
    config: Config,
    *,
    recompute: RecomputePolicy | None = None,
    offload: OffloadPolicy | None = None,
    automatic: bool = False,
    factor: int = 1,
    num_ranks: int | None = None,
) -> bool:
    """Whether the closest option would fit with one thing changed."""
    workload, layout = best.workload, best.layout
    fabric, demands, chain = workload.fabric, workload.demands, workload.chain
    kind = best.kind if config.pipeline != "auto" or not config.auto_partition else "1f1b"
    ranks, cuts = layout.ranks, layout.cuts
    if automatic or num_ranks is not None or kind != best.kind:
        pipeline = num_ranks or layout.num_ranks
        v = layout.num_stages // layout.num_ranks if kind == best.kind and not automatic else None
        ranks = place_stages(kind, num_ranks=pipeline, stages_per_rank=v)
        chain = chain.bound(stages_per_rank=len(ranks) // pipeline)
        mesh = Mesh.of(world_size=pipeline, pipeline=pipeline)
        fabric = replace(fabric, mesh=mesh)
    if len(ranks) > chain.num_atoms:
        return False
    if factor > 1:
        smaller = (cost.scaled(seconds=1 / factor, num_bytes=1 / factor) for cost in chain.costs)
        chain = replace(chain, costs=tuple(smaller))
    changed = Workload(
        chain,
        num_microbatches=workload.num_microbatches * factor,
        fabric=fabric,
        demands=replace(
            demands, recompute=recompute or demands.recompute, offload=offload or demands.offload
        ),
    )
    fixed = None if config.auto_partition or automatic else cuts
    return make_draft(changed, kind, ranks, cuts=fixed).overflow_bytes <= 0


Candidates = Mapping[int, tuple[ModelGraph, Profile]]
"""For each number of microbatches, the graph traced at that microbatch size and its profile."""

_NUM_SIMULATED = 12
_FEWEST_SIMULATED = 2
_NUM_REFINED = 4
_MOST_ACTIONS = 200_000


def make_plan(
    candidates: Candidates,
    *,
    cluster: Cluster,
    config: Config,
    mesh: Mesh,
    placement: Mapping[str, int] | None = None,
    optimizer_factor: float = 2.0,
    division: Division | None = None,
    previous: Plan | None = None,
) -> Plan:
    """Chooses microbatches, schedule, stages and recomputation."""
    if division is not None and not division.cuts and mesh.tensor != config.tensor_parallel_degree:
        raise PlanError(
            f"{mesh.tensor} ranks that share layers would each compute all of them: on these machines, what "
            "they would exchange takes longer. Set tensor_parallel_degree to have them all the same."
        )
    chosen = _chosen_counts(candidates, config)
    fabric = Fabric(cluster=cluster, mesh=mesh)
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
        chains = {m: build_chain(*candidates[m], division) for m in counts}
        for m, chain in chains.items():
            drafts += drafts_of(
                chain, m, placement or {}, config=config, fabric=fabric, demands=demands, previous=previous
            )
        options += [draft.work_out() for draft in _promising(drafts, previous)]
        if any(option.fits for option in options):
            break
    else:
        raise infeasible(options, config=config)
    near_tie = 1.0 + error_of_comparison(candidates[m] for m in counts)
    choose = partial(_chosen, previous=previous, memory_weight=demands.memory_weight, near_tie=near_tie)
    best, kept = choose(options)
    if config.auto_partition and demands.memory_weight == 0 and kept is None:
        options = _on_boundaries(_refined(options))
        best, kept = choose(options)
    stays = kept is not None and kept is not best
    best = kept or best
    graph, _ = candidates[best.num_microbatches]
    plan = plan_of(best, graph=graph, config=config, mesh=mesh, options=options, division=division)
    notes = [
        *(["It is that of the last run: no other is faster by more than predictions err."] if stays else []),
        *tensor_reasons(best, division=division, graph=graph),
        *statistics_reasons(candidates, best.num_microbatches, config=config, group=groups.index(counts)),
    ]
    assert plan.prediction is not None
    others = seconds_without_pipeline(chains, mesh, cluster=cluster, demands=demands)
    prediction = plan.prediction.model_copy(update=others)
    return plan.model_copy(update={"why": (*plan.why, *notes), "prediction": prediction})


def _chosen(
    options: Sequence[Option], *, previous: Plan | None, memory_weight: float, near_tie: float
) -> tuple[Option, Option | None]:
    """The best option, and the one that the previous plan is, where that stays."""
    fitting = [option for option in options if option.fits]
    best, *_ = rank(fitting, memory_weight=memory_weight, near_tie=near_tie)
    return best, kept_plan(best, fitting, previous, memory_weight=memory_weight)


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


def _promising(drafts: Sequence[Draft], previous: Plan | None) -> list[Draft]:
    """The dozen with the best closed-form time that fit, the best of each family, and the previous."""
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


def _refined(options: Sequence[Option]) -> list[Option]:
    """The options, the best few of them with their cuts moved to where the simulated step is shortest."""
    best = rank([option for option in options if option.fits], memory_weight=0.0)[:_NUM_REFINED]
    better = {id(option): refine(option, max_actions=_MOST_ACTIONS // 4) for option in best}
    return [better.get(id(option), option) for option in options]


def _on_boundaries(options: Sequence[Option]) -> list[Option]:
    """The options, and the best few with the cuts that run through blocks moved to their boundaries."""
    best = rank([option for option in options if option.fits], memory_weight=0.0)[:_NUM_REFINED]
    moved: dict[tuple[str, int, tuple[int, ...]], Option] = {}
    for option in best:
        chain, workload = option.workload.chain, option.workload
        seconds = (chain.column("forward_s") + chain.column("backward_s")).tolist()
        cuts = on_boundaries(option.layout.cuts, chain.labels, seconds, chain.starts)
        if cuts is not None and (key := (option.kind, option.num_microbatches, cuts)) not in moved:
            moved[key] = make_draft(workload, option.kind, option.layout.ranks, cuts=cuts).work_out()
    return [*options, *moved.values()]

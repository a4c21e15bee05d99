"""Searches for the best plan of a profiled model on given machines.

::

    for each m:  graph, profile ─► chain ─► drafts: schedule family x stages per rank x ties x exposure
                                               │  closed form: keep the best dozen, and the best of each
                                               family ▼
                                            options: simulated with their real schedule
                                               │  drop what does not fit; near ties go to the simplest,
                                               │  and the previous plan stays within the error:
                                               │  else cuts of the best few are moved ▼
                                               ▼
                                             plan: prediction, reasons, runners-up

The search is deterministic: ranks that plan separately reach the same plan.
"""

from collections.abc import Mapping, Sequence
from functools import partial

from shardwright.cluster import Cluster
from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.mesh import Mesh
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.planner.batches import count_groups, statistics_reasons
from shardwright.planner.cuts import on_boundaries
from shardwright.planner.division import Division
from shardwright.planner.draft import Draft, Option, make_draft
from shardwright.planner.drafts import drafts_of, refine, seconds_without_pipeline
from shardwright.planner.fabric import Fabric
from shardwright.planner.infeasible import infeasible
from shardwright.planner.model_chain import build_chain
from shardwright.planner.objective import OffloadPolicy
from shardwright.planner.option_plan import plan_of
from shardwright.planner.reasons import (
    SIMPLICITY,
    error_of_comparison,
    is_of,
    kept_plan,
    rank,
    tensor_reasons,
)
from shardwright.planner.workload import Demands
from shardwright.profile import Profile

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

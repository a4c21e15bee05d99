"""Explains why nothing fits: by how much, on which rank, and the smallest changes that would help."""

from collections.abc import Sequence
from dataclasses import replace

from shardwright.config import Config
from shardwright.errors import InfeasiblePlanError
from shardwright.mesh import Mesh
from shardwright.planner.draft import Option, make_draft
from shardwright.planner.objective import OffloadPolicy, RecomputePolicy
from shardwright.planner.reasons import describe_memory, title
from shardwright.planner.workload import Workload
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

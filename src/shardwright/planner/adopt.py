"""Adopts a finished plan: its decisions that override the settings, and its schedule."""

from collections.abc import Iterator
from dataclasses import asdict

from shardwright.config import Config
from shardwright.plan import Plan
from shardwright.quantities import format_bytes
from shardwright.schedule import Schedule, StageCost, build_schedule

__all__ = ["overruled_settings", "schedule_of", "stage_costs_of"]


def overruled_settings(plan: Plan, config: Config) -> Iterator[str]:
    """The settings that a plan does not keep, a sentence each."""
    stages_per_rank = len(plan.stages) / plan.mesh.pipeline
    planned = {
        "pipeline_parallel_degree": plan.mesh.pipeline,
        "data_parallel_degree": plan.mesh.data,
        "sharded_data_parallel_degree": plan.mesh.shard,
        "tensor_parallel_degree": plan.mesh.tensor,
        "context_parallel_degree": plan.mesh.context,
        "expert_parallel_degree": plan.mesh.expert,
        "placement_strategy": plan.mesh.placement_strategy,
        "microbatches": plan.schedule.microbatches,
        "pipeline": plan.schedule.kind,
        "active_microbatches": plan.schedule.active_microbatches,
        "virtual_stages": int(stages_per_rank) if stages_per_rank.is_integer() else stages_per_rank,
    }
    pins = config.pins
    for key, value in planned.items():
        if key in pins and pins[key] != value:
            yield f"{key} is {pins[key]!r}, but the plan has {value!r}."
    if not config.auto_partition:
        yield "auto_partition is False, but the plan says where each unit goes."
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    units = sum(len(stage.units) for stage in plan.stages)
    wanted = {"none": 0, "full": units}.get(config.activation_checkpointing, recomputed)
    if wanted != recomputed:
        yield (
            f"activation_checkpointing is {config.activation_checkpointing!r}, but the plan recomputes "
            f"{recomputed} of {units} units."
        )
    offloaded = sum(len(stage.offload) for stage in plan.stages)
    pinned = config.offload_activations
    if pinned != "auto" and "offload_activations" in pins and offloaded != (units if pinned else 0):
        yield (
            f"offload_activations is {pinned!r}, but the plan offloads what {offloaded} of "
            f"{units} units keep."
        )
    if config.memory_limit is not None and plan.prediction is not None:
        peak = max(memory.peak_bytes for memory in plan.prediction.memory)
        if peak > config.memory_limit:
            yield (
                f"memory_limit is {format_bytes(config.memory_limit)}, but the plan is predicted to need "
                f"{format_bytes(peak)}."
            )


def stage_costs_of(plan: Plan) -> tuple[StageCost, ...] | None:
    """The costs that a plan was made with; None for plans written by hand."""
    if plan.prediction is None:
        return None
    return tuple(
        StageCost(
            **asdict(stage.cost),
            offload_bytes=stage.offload_bytes,
            window_bytes=stage.window_bytes,
            tail_bytes=stage.tail_bytes,
        )
        for stage in plan.prediction.stages
    )


def schedule_of(plan: Plan, *, forward_only: bool = False) -> Schedule:
    """The order of work that a plan asks for, without transfers; the same on every rank."""
    schedule = build_schedule(
        plan.schedule.kind,
        stage_ranks=plan.stage_ranks,
        num_microbatches=plan.schedule.microbatches,
        active_microbatches=plan.schedule.active_microbatches,
        forward_only=forward_only,
        costs=stage_costs_of(plan),
    )
    return schedule.with_host_copies([number for number, stage in enumerate(plan.stages) if stage.offload])

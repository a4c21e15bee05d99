"""Taking a finished plan: from a file, and from a plan to its schedule."""

from collections.abc import Iterator

from shardwright.config import Config
from shardwright.errors import PlanError
from shardwright.model_graph import ModelGraph
from shardwright.plan import Plan
from shardwright.problems import join
from shardwright.schedule import Schedule, StageCost, build_schedule
from shardwright.units import format_bytes

__all__ = ["read_plan", "schedule_of", "stage_costs_of"]


def read_plan(config: Config, *, graph: ModelGraph, world_size: int) -> Plan:
    """Reads the plan file that the settings name.

    Args:
        config: its `plan` is the path; what else it pins must agree with the file.
        graph: the traced model.
        world_size: ranks that are running.

    Raises:
        StalePlanError: the plan was made for another model, world or version; the difference is shown.
        PlanError: there is no such file, it is damaged, or the settings contradict it.
    """
    if config.plan is None:
        raise PlanError("no plan file is named. Set plan to its path.")
    plan = Plan.read(config.plan)
    plan.check(graph, world_size=world_size)
    problems = list(_contradictions(plan, config))
    if problems:
        raise PlanError(
            join(
                f"the settings contradict plan file {config.plan} (remove the settings, or the plan):",
                problems,
            )
        )
    return plan


def stage_costs_of(plan: Plan) -> tuple[StageCost, ...] | None:
    """The costs that a plan was made with; None for plans written by hand."""
    if plan.prediction is None:
        return None
    return tuple(
        StageCost(
            forward_s=stage.forward_s,
            backward_s=stage.backward_s,
            weight_s=stage.weight_s,
            saved_bytes=stage.saved_bytes,
            weight_bytes=stage.weight_bytes,
            input_s=stage.input_s,
        )
        for stage in plan.prediction.stages
    )


def schedule_of(plan: Plan, *, forward_only: bool = False) -> Schedule:
    """The order of work that a plan asks for, without transfers; the same on every rank.

    Args:
        plan: what to execute.
        forward_only: leave the backward out, for evaluation.
    """
    return build_schedule(
        plan.schedule.kind,
        stage_ranks=plan.stage_ranks,
        num_microbatches=plan.schedule.microbatches,
        active_microbatches=plan.schedule.active_microbatches,
        forward_only=forward_only,
        costs=stage_costs_of(plan),
    )


def _contradictions(plan: Plan, config: Config) -> Iterator[str]:
    stages_per_rank = len(plan.stages) / plan.mesh.pipeline
    planned = {
        "pipeline_parallel_degree": plan.mesh.pipeline,
        "data_parallel_degree": plan.mesh.data,
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
    recomputed = sum(len(stage.recompute) for stage in plan.stages)
    units = sum(len(stage.units) for stage in plan.stages)
    wanted = {"none": 0, "full": units}.get(config.activation_checkpointing, recomputed)
    if wanted != recomputed:
        yield (
            f"activation_checkpointing is {config.activation_checkpointing!r}, but the plan recomputes "
            f"{recomputed} of {units} units."
        )
    if config.memory_limit is not None and plan.prediction is not None:
        peak = max(memory.peak for memory in plan.prediction.memory)
        if peak > config.memory_limit:
            yield (
                f"memory_limit is {format_bytes(config.memory_limit)}, but the plan is predicted to need "
                f"{format_bytes(peak)}."
            )

"""Prints a plan as text, for people."""

import math
from collections.abc import Iterator, Sequence

from shardwright.plan import MemoryPrediction, Plan, Prediction
from shardwright.quantities import counted, format_bytes, format_parameters, format_seconds
from shardwright.text import align, printable

_FEW_STAGES = 4

MEMORY_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "work", "sum")
"""What a rank's predicted memory is for, as `memory_cells` tells it."""


def format_plan_briefly(plan: Plan) -> str:
    """The plan in a run's log: what it is, and its stages, in two lines."""
    # Here, because the planner imports numpy: commands that show plans answer --help before.
    from shardwright.planner.cuts import block_of

    spans, begin = [], 0
    for stage in plan.stages:
        end = begin + len(stage.units)
        of_stage = [
            block_of(plan.model.units, call, ends=ends) for call, ends in ((begin, False), (end - 1, True))
        ]
        spans.append(printable(" .. ".join(dict.fromkeys(of_stage))) if stage.units else "nothing")
        begin = end
    if len(spans) <= _FEW_STAGES:
        told = [
            f"{span} (rank {rank})" if len(spans) > 1 else span
            for span, rank in zip(spans, plan.stage_ranks, strict=True)
        ]
        return f"{title_of(plan)}\n  stages: {' | '.join(told)}"
    sizes = [len(stage.units) for stage in plan.stages]
    units = f"{min(sizes)} to {max(sizes)} units" if min(sizes) < max(sizes) else f"{sizes[0]} units"
    return f"{title_of(plan)}\n  stages: {len(spans)} of {units}, {spans[0]} to {spans[-1]}"


def format_plan(plan: Plan) -> str:
    """The plan in the outcome of a run: a title, the table of stages, the reasons."""
    lines = [title_of(plan), *_indented(plan.table()), *(f"  {printable(reason)}" for reason in plan.why)]
    return "\n".join(lines)


def format_plan_in_full(plan: Plan) -> str:
    blocks = [format_plan(plan), _model(plan)]
    if plan.prediction is not None and plan.prediction.memory:
        blocks.append("\n".join(["memory at the peak", *_indented(_memory(plan.prediction.memory))]))
    if plan.alternatives:
        blocks.append("\n".join(["runners-up", *_indented(alternatives_table(plan))]))
    return "\n\n".join(blocks)


def title_of(plan: Plan) -> str:
    mesh, schedule = plan.mesh, plan.schedule
    title = (
        f"plan: {schedule.kind}, {counted(schedule.microbatches, 'microbatch', 'es')}, "
        f"{counted(len(plan.stages), 'stage')} on {counted(mesh.pipeline, 'rank')}"
    )
    shared = {"context": mesh.context, "expert": mesh.expert, "tensor": mesh.tensor}
    title += "".join(f", {name} degree {degree}" for name, degree in shared.items() if degree > 1)
    if mesh.data > 1:
        title += f", {mesh.data} replicas"
    if plan.prediction is not None:
        predicted = plan.prediction
        error = f" +- {predicted.error:.0%}" if predicted.error else ""
        title += f"; predicted step {format_seconds(predicted.step_s)}{error}, bubble {predicted.bubble:.0%}"
        if predicted.provenance == "measured":
            title += _without_pipeline(plan, predicted)
    return title


def _without_pipeline(plan: Plan, predicted: Prediction) -> str:
    """What takes less for as many samples: one process, replicas that have all of the model."""
    mesh = plan.mesh.grid
    ways = {
        "one process alone is": mesh.data * predicted.alone_s,
        f"{mesh.world_size} replicas are": predicted.replicas_s / mesh.pipeline,
    }
    return "".join(
        f"; {way} faster: {format_seconds(seconds)} for as many samples"
        for way, seconds in ways.items()
        if 0 < seconds < predicted.step_s
    )


def seconds_of_one_process(plan: Plan) -> float:
    """Predicted seconds of the units of one replica in one process; 0 where they are not known."""
    if plan.prediction is None:
        return 0.0
    one = math.fsum(stage.forward_s + stage.backward_s for stage in plan.prediction.stages)
    return plan.schedule.microbatches * one


def _model(plan: Plan) -> str:
    model = plan.model
    recomputed, offloaded = (
        sum(len(getattr(stage, name)) for stage in plan.stages) for name in ("recompute", "offload")
    )
    lines = [
        f"model {model.fingerprint}: {format_parameters(model.num_parameters)} parameters, "
        f"{counted(len(model.units), 'unit')}"
        + (f", {recomputed} of them recomputed" if recomputed else "")
        + (f", {offloaded} offloaded" if offloaded else "")
        + (", compiled" if plan.compiled else "")
    ]
    for name, stages in plan.replicated.items():
        lines.append(f"  {printable(name)} is held by stages {', '.join(map(str, stages))}")
    if plan.tensor is not None:
        if plan.tensor.between_units is not None:
            dim, inner = plan.tensor.between_units, plan.tensor.cut_again
            axis = "tensor" if plan.mesh.tensor > 1 else "expert"
            again = "" if inner is None else f", and along dimension {inner} over the {axis} axis"
            lines.append(f"  tensors between units are cut along dimension {dim}{again}")
        lines += [f"  {printable(name)}: {cut}" for name, cut in plan.tensor.cuts.items()]
    return "\n".join([*lines, f"  made by {plan.created_by}"])


def _memory(ranks: tuple[MemoryPrediction, ...]) -> str:
    rows: list[Sequence[str]] = [("rank", *MEMORY_COLUMNS)]
    rows += [(str(rank), *memory_cells(row)) for rank, row in enumerate(ranks)]
    return align(rows)


def memory_cells(memory: MemoryPrediction) -> tuple[str, ...]:
    """A rank's predicted memory in `MEMORY_COLUMNS`: the batch is a part of the work."""
    sizes = (
        memory.parameters_bytes,
        memory.gradients_bytes,
        memory.optimizer_bytes,
        memory.activations_bytes,
        memory.batch_bytes + memory.work_bytes,
        memory.peak_bytes,
    )
    return tuple(map(format_bytes, sizes))


def alternatives_table(plan: Plan) -> str:
    rows = [("schedule", "microbatches", "stages", "step", "verdict")]
    rows += [
        (a.schedule, str(a.microbatches), str(a.stages), format_seconds(a.step_s), a.verdict)
        for a in plan.alternatives
    ]
    return align(rows)


def _indented(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.splitlines())

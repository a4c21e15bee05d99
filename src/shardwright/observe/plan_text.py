"""Prints a plan as text, for people."""

from collections.abc import Iterator, Sequence

from shardwright.plan import MemoryPrediction, Plan, align
from shardwright.printable import printable
from shardwright.units import format_bytes, format_count, format_seconds

__all__ = ["format_plan", "format_plan_in_full"]


def format_plan(plan: Plan) -> str:
    """The plan in a run's log: a title, the table of stages, the reasons."""
    lines = [_title(plan), *_indented(plan.table()), *(f"  {printable(reason)}" for reason in plan.why)]
    return "\n".join(lines)


def format_plan_in_full(plan: Plan) -> str:
    """The plan, its model, and its predictions."""
    blocks = [format_plan(plan), _model(plan)]
    if plan.prediction is not None and plan.prediction.memory:
        blocks.append("\n".join(["memory at the peak", *_indented(_memory(plan.prediction.memory))]))
    if plan.trials:
        blocks.append("\n".join(["tried on the machines", *_indented(_trials(plan))]))
    if plan.alternatives:
        blocks.append("\n".join(["runners-up", *_indented(_alternatives(plan))]))
    return "\n\n".join(blocks)


def _title(plan: Plan) -> str:
    mesh, schedule = plan.mesh, plan.schedule
    title = (
        f"plan: {schedule.kind}, {_counted(schedule.microbatches, 'microbatch', 'es')}, "
        f"{_counted(len(plan.stages), 'stage')} on {_counted(mesh.pipeline, 'rank')}"
    )
    if mesh.data > 1:
        title += f", {mesh.data} replicas"
    if plan.prediction is not None:
        predicted = plan.prediction
        error = f" +- {predicted.error:.0%}" if predicted.error else ""
        title += f"; predicted step {format_seconds(predicted.step_s)}{error}, bubble {predicted.bubble:.0%}"
    return title


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _model(plan: Plan) -> str:
    model, recomputed = plan.model, sum(len(stage.recompute) for stage in plan.stages)
    lines = [
        f"model {model.fingerprint}: {format_count(model.num_parameters)} parameters, "
        f"{len(model.units)} units" + (f", {recomputed} of them recomputed" if recomputed else "")
    ]
    for name, stages in plan.replicated.items():
        lines.append(f"  {printable(name)} is held by stages {', '.join(map(str, stages))}")
    return "\n".join([*lines, f"  made by {plan.created_by}"])


def _memory(ranks: tuple[MemoryPrediction, ...]) -> str:
    parts = ("parameters", "gradients", "optimizer", "activations", "work", "peak")
    rows: list[Sequence[str]] = [("rank", *parts[:-1], "sum")]
    rows += [
        (str(rank), *(format_bytes(getattr(row, part)) for part in parts)) for rank, row in enumerate(ranks)
    ]
    return align(rows)


def _alternatives(plan: Plan) -> str:
    rows = [("schedule", "microbatches", "stages", "step", "verdict")]
    rows += [
        (a.schedule, str(a.microbatches), str(a.stages), format_seconds(a.step_s), a.verdict)
        for a in plan.alternatives
    ]
    return align(rows)


def _trials(plan: Plan) -> str:
    rows = [("pipeline", "data", "shards", "schedule", "microbatches", "step", "predicted")]
    for trial in plan.trials:
        mesh, schedule = trial.mesh, trial.schedule
        degrees = (str(mesh.pipeline), str(mesh.data), str(mesh.shard))
        error = f" ({trial.predicted_s / trial.step_s - 1:+.0%})" if trial.step_s else ""
        predicted = format_seconds(trial.predicted_s) + error
        rows.append(
            (*degrees, schedule.kind, str(schedule.microbatches), format_seconds(trial.step_s), predicted)
        )
    return align(rows)


def _indented(text: str) -> Iterator[str]:
    return (f"  {line}" for line in text.splitlines())

"""Gathers all data of a report from a run folder or a plan file, before anything is drawn."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from shardwright.errors import UsageError
from shardwright.mesh import Mesh
from shardwright.observe.metrics import read_steps
from shardwright.observe.report.measured import (
    MeasuredTimeline,
    StepMetrics,
    read_metrics,
    read_timeline,
)
from shardwright.observe.report.spans import Span, choose_ranks, seconds_of_stages, simulated_spans, thin
from shardwright.observe.run_folder import RunFolder
from shardwright.plan import MemoryPrediction, Plan, Prediction
from shardwright.planner.explain.memory_over_time import RankMemory, memory_over_time
from shardwright.planner.explain.plan_replay import Replay, base_setting, play
from shardwright.planner.explain.waterfall import Waterfall, break_down
from shardwright.printable import printable

__all__ = ["Compared", "Predicted", "ReportData", "gather"]


@dataclass(frozen=True, slots=True)
class Compared:
    """A figure as predicted and as measured; None where it is not known.

    Attributes:
        name: what it is.
        predicted: in the unit that the name ends with.
        measured: in the same.
        remark: why the two are not to be compared; empty where they are.
    """

    name: str
    predicted: float | None
    measured: float | None
    remark: str = ""

    @property
    def error(self) -> float | None:
        """predicted / measured - 1; None where one is not known, or they are not to be compared."""
        if self.predicted is None or not self.measured or self.remark:
            return None
        return self.predicted / self.measured - 1.0

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write: the unit is in the names of the numbers."""
        name, _, unit = self.name.removesuffix(")").rpartition(" (")
        return {
            "name": name,
            f"predicted_{unit}": self.predicted,
            f"measured_{unit}": self.measured,
            "error": self.error,
            "remark": self.remark,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The part of a report that needs a plan with a prediction.

    Attributes:
        waterfall: parts of the step.
        update_s: seconds of the optimizer's update, which is not a part of it; 0: not known.
        step_s: seconds of the replayed schedule alone, for the timeline.
        idle_s: for each pipeline rank, the seconds of it without work.
        spans: the timeline of the ranks that are shown.
        memory: over time, of the ranks that are shown.
        stack: predicted peak of every pipeline rank.
        limit_bytes: memory that a rank may use; 0: not known.
    """

    waterfall: Waterfall
    update_s: float
    step_s: float
    idle_s: tuple[float, ...]
    spans: tuple[Span, ...]
    memory: tuple[RankMemory, ...]
    stack: tuple[MemoryPrediction, ...]
    limit_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportData:
    """Everything that a report shows.

    Attributes:
        name: of the run or of the plan file.
        plan: the plan; None for runs without one.
        ranks: the pipeline ranks that are shown one by one.
        num_ranks: all pipeline ranks.
        compared: step time, the optimizer's update, and peak memory, predicted beside measured.
        stage_seconds: measured forward and backward of one microbatch, by stage; empty without a timeline.
        spent: what ranks spend a step on, mean of them, predicted beside measured.
        predicted: what the plan predicts; None where it predicts nothing.
        timeline: the measured one; None where there is none.
        steps: metrics of all steps.
        peak_by_rank: measured peak of each pipeline rank, the largest of its replicas, bytes.
        notes: what is not there, and how to get it.
        trace_file: name of the Chrome trace beside the report; None where there is none.
    """

    name: str
    plan: Plan | None
    ranks: tuple[int, ...]
    num_ranks: int
    compared: tuple[Compared, ...]
    spent: tuple[Compared, ...]
    stage_seconds: Mapping[int, tuple[float, float]]
    predicted: Predicted | None
    timeline: MeasuredTimeline | None
    steps: tuple[StepMetrics, ...]
    peak_by_rank: tuple[float, ...]
    notes: tuple[str, ...]
    trace_file: str | None

    def to_dict(self) -> dict[str, Any]:
        """A form that `json` can write."""
        document: dict[str, Any] = {
            "name": self.name,
            "plan": None if self.plan is None else self.plan.model_dump(mode="json"),
            "ranks_shown": list(self.ranks),
            "pipeline_ranks": self.num_ranks,
            "compared": [row.to_dict() for row in self.compared],
            "stage_seconds": {str(stage): list(times) for stage, times in self.stage_seconds.items()},
            "spent": [row.to_dict() for row in self.spent],
            "predicted": None,
            "measured_timeline": None if self.timeline is None else asdict(self.timeline),
            "steps": [asdict(step) for step in self.steps],
            "peak_by_rank_bytes": list(self.peak_by_rank),
            "notes": list(self.notes),
            "trace_file": self.trace_file,
        }
        if self.predicted is not None:
            stack = [
                {f"{part}_bytes": value for part, value in memory.model_dump().items()}
                for memory in self.predicted.stack
            ]
            document["predicted"] = {
                "waterfall": asdict(self.predicted.waterfall),
                "update_s": self.predicted.update_s,
                "schedule_s": self.predicted.step_s,
                "idle_s": list(self.predicted.idle_s),
                "timeline": [asdict(span) for span in self.predicted.spans],
                "memory_over_time": [asdict(row) for row in self.predicted.memory],
                "memory": stack,
                "limit_bytes": self.predicted.limit_bytes,
            }
        return document


def gather(path: Path) -> ReportData:
    """The data of a run folder or of a plan file.

    Raises:
        UsageError: there is no such run or plan, or a file of it is damaged.
        PlanError: the plan file cannot be used.
    """
    if not path.exists():
        raise UsageError(
            f"there is no {printable(str(path))}. Name a run folder or a plan file; runs: shardwright runs"
        )
    if not path.is_dir():
        return _put_together(path.stem, Plan.read(path), steps=(), timeline=None, trace_file=None, run=False)
    folder = RunFolder(path.absolute())
    plan = Plan.read(folder.plan_file) if folder.plan_file.exists() else None
    records = read_steps(folder.metrics_file)
    steps = read_metrics(records, folder.metrics_file)
    if plan is None and not steps:
        raise UsageError(
            f"{printable(str(path))} holds neither plan.json nor metrics.jsonl: it is no run folder, or the "
            "run ended before its first step. Name another: shardwright runs"
        )
    timeline = read_timeline(folder.trace_file)
    return _put_together(
        folder.path.name,
        plan,
        steps=steps,
        timeline=timeline,
        trace_file=folder.trace_file.name if folder.trace_file.exists() else None,
        run=True,
        left_out=records.left_out,
    )


def _put_together(
    name: str,
    plan: Plan | None,
    *,
    steps: tuple[StepMetrics, ...],
    timeline: MeasuredTimeline | None,
    trace_file: str | None,
    run: bool,
    left_out: str = "",
) -> ReportData:
    num_ranks = plan.mesh.pipeline if plan is not None else _num_ranks(timeline)
    replay = None if plan is None or plan.prediction is None else play(base_setting(plan))
    limit_bytes = next((step.limit_bytes for step in reversed(steps) if step.limit_bytes), None)
    ranks = choose_ranks(num_ranks, important=_important(plan, replay))
    predicted = None
    if plan is not None and replay is not None:
        predicted = _predicted(plan, replay, ranks, limit_bytes=limit_bytes)
    spent = _spent(replay, timeline, num_ranks)
    stage_seconds = {} if timeline is None else seconds_of_stages(timeline.spans)
    if timeline is not None:
        timeline = replace(timeline, spans=thin(timeline.spans, ranks))
    peaks = _peaks(plan, steps)
    return ReportData(
        name=name,
        plan=plan,
        ranks=ranks,
        num_ranks=num_ranks,
        compared=_compared(plan, steps, peaks),
        spent=spent,
        stage_seconds=stage_seconds,
        predicted=predicted,
        timeline=timeline,
        steps=steps,
        peak_by_rank=peaks,
        notes=(*_notes(plan, steps, timeline, run=run), *filter(None, [left_out])),
        trace_file=trace_file,
    )


def _predicted(plan: Plan, replay: Replay, ranks: Sequence[int], *, limit_bytes: float | None) -> Predicted:
    assert plan.prediction is not None
    conditions = plan.prediction.conditions
    planned_bytes = conditions.memory_limit_bytes if conditions is not None else 0
    memory: tuple[RankMemory, ...] = ()
    stack = _predicted_memory(plan)
    if stack:
        rows = memory_over_time(replay.simulation, replay.setting.costs, stack)
        memory = tuple(rows[rank] for rank in ranks)
    return Predicted(
        waterfall=break_down(plan),
        update_s=plan.prediction.update_s,
        step_s=replay.simulation.step_s,
        idle_s=replay.idle_s,
        spans=thin(simulated_spans(replay.simulation), ranks),
        memory=memory,
        stack=stack,
        limit_bytes=planned_bytes or limit_bytes or 0,
    )


def _predicted_memory(plan: Plan) -> tuple[MemoryPrediction, ...]:
    """The predicted memory of every pipeline rank; nothing where an edited plan lacks some."""
    memory = () if plan.prediction is None else plan.prediction.memory
    return memory if len(memory) == plan.mesh.pipeline else ()


def _important(plan: Plan | None, replay: Replay | None) -> set[int]:
    """The ranks with most work and with most memory."""
    found: set[int] = set()
    if replay is not None:
        busy_s = replay.simulation.busy_s
        found.add(busy_s.index(max(busy_s)))
    memory = () if plan is None else _predicted_memory(plan)
    if memory:
        found.add(max(range(len(memory)), key=lambda rank: memory[rank].peak))
    return found


def _num_ranks(timeline: MeasuredTimeline | None) -> int:
    return 1 if timeline is None else max(span.rank for span in timeline.spans) + 1


def _compared(
    plan: Plan | None, steps: Sequence[StepMetrics], peaks: Sequence[float]
) -> tuple[Compared, ...]:
    prediction = plan.prediction if plan is not None else None
    # The first step traces and plans.
    times = [step.step_s for step in (steps[1:] or steps) if step.step_s is not None]
    updates = [step.update_s for step in steps if step.update_s is not None]
    memory = prediction.memory if prediction is not None else ()
    return (
        Compared(
            "step time (s)", prediction.step_s if prediction else None, median(times) if times else None
        ),
        Compared(
            "optimizer's update (s)",
            prediction.update_s or None if prediction else None,
            median(updates) if updates else None,
        ),
        Compared(
            "peak memory (bytes)",
            max((part.peak for part in memory), default=None),
            max(peaks, default=None),
            _WHOLE_PROCESS if _on_cpus(prediction) else "",
        ),
    )


_WHOLE_PROCESS = "measured of the whole process: Python and its libraries are a part of it"


def _on_cpus(prediction: Prediction | None) -> bool:
    conditions = None if prediction is None else prediction.conditions
    return conditions is not None and conditions.cores > 0


def _spent(replay: Replay | None, timeline: MeasuredTimeline | None, num_ranks: int) -> tuple[Compared, ...]:
    """Forward, backward, and the rest of the schedule, in which ranks wait or idle."""
    predicted = _means(() if replay is None else simulated_spans(replay.simulation), num_ranks)
    measured = _means(() if timeline is None else timeline.spans, num_ranks)
    names = ("forward (s)", "backward (s)", "waiting and idle (s)")
    return tuple(map(Compared, names, predicted, measured))


def _means(spans: Sequence[Span], num_ranks: int) -> tuple[float | None, ...]:
    if not spans:
        return (None, None, None)
    sums = {"forward": 0.0, "backward": 0.0}
    for span in spans:
        if span.kind in _WORK:
            sums[_WORK[span.kind]] += (span.end_s - span.start_s) / num_ranks
    end_s = max((span.end_s for span in spans if span.kind in _WORK), default=0.0)
    if not end_s:
        return (None, None, None)  # nothing but waiting was recorded
    return sums["forward"], sums["backward"], end_s - sum(sums.values())


_WORK = {"forward": "forward", "backward": "backward", "input": "backward", "weight": "backward"}


def _peaks(plan: Plan | None, steps: Sequence[StepMetrics]) -> tuple[float, ...]:
    """Measured peak of each pipeline rank: the largest over its replicas and over all steps."""
    by_rank: Mapping[int, float] = {}
    for step in steps:
        by_rank = {r: max(peak, by_rank.get(r, 0.0)) for r, peak in enumerate(step.peak_bytes)} or by_rank
    if plan is None or len(by_rank) != plan.mesh.world_size:
        return tuple(by_rank.values())
    mesh = Mesh.of(
        world_size=plan.mesh.world_size,
        pipeline=plan.mesh.pipeline,
        data=plan.mesh.data,
        tensor=plan.mesh.tensor,
        context=plan.mesh.context,
        expert=plan.mesh.expert,
        placement=plan.mesh.placement_strategy,
    )
    found = [0.0] * plan.mesh.pipeline
    for rank, peak in by_rank.items():
        where = mesh.group_rank("pp", rank)
        found[where] = max(found[where], peak)
    return tuple(found)


def _notes(
    plan: Plan | None, steps: Sequence[StepMetrics], timeline: MeasuredTimeline | None, *, run: bool
) -> tuple[str, ...]:
    found = []
    if plan is None:
        found.append(
            "This run has no plan, so nothing was predicted: it has one stage. "
            "Set plan_one_stage to predict such runs, too."
        )
    elif plan.prediction is None:
        found.append("The plan predicts nothing: it was written by hand, or its prediction was removed.")
    elif plan.prediction.conditions is None:
        found.append(
            "The plan does not say which links and cores it was made for (an older version wrote it): "
            "the predicted timeline shows messages that take no time."
        )
    if run and timeline is None:
        found.append(
            "No timeline was measured. Set trace to true and run at least 3 steps to get one: "
            "shardwright run --set trace=true"
        )
    if run and not steps:
        found.append("No step was done, so nothing was measured.")
    if run and steps and not any(step.peak_bytes for step in steps):
        found.append("The run measured no memory.")
    return tuple(found)

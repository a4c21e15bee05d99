"""Gathers all data of a report from a run folder or a plan file, before anything is drawn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardwright.errors import UsageError
from shardwright.observe.metrics import Records, StepRecord, read_steps, record_of
from shardwright.observe.report.facts import (
    MemoryRow,
    RunFacts,
    compare_figures,
    memory_rows,
    on_cpus,
    peaks_by_rank,
    read_facts,
)
from shardwright.observe.report.measured import (
    MeasuredTimeline,
    Span,
    choose_ranks,
    read_recorded,
    seconds_of_stages,
    simulated_spans,
    thin,
)
from shardwright.observe.report.parts import Compared, StepPart, spent_of, step_parts
from shardwright.observe.report.verdict import Verdict, judge
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.observe.summary import totals_of
from shardwright.plan import MemoryPrediction, Plan
from shardwright.planner.replay import Replay, base_setting, play
from shardwright.planner.waterfall import RankMemory, Waterfall, break_down, memory_over_time
from shardwright.text import printable


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """The part of a report that needs a plan with a prediction.

    Attributes:
        update_s: seconds of the optimizer's update, which is not a part of it; 0: not known.
        step_s: seconds of the replayed schedule alone, for the timeline.
        idle_s: for each pipeline rank, the seconds of it without work.
        spans: the timeline of the ranks that are shown.
        memory: over time, of the ranks that are shown.
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
        compared: step time, the optimizer's update, and peak memory, predicted beside measured.
        stage_seconds: measured forward and backward of one microbatch, by stage; empty without a timeline.
        spent: what ranks spend a step on, mean of them, predicted beside measured.
        predicted: what the plan predicts; None where it predicts nothing.
        timeline: of the recorded step that is most like the others; None where there is none.
        parts: of a step, predicted beside measured in the step of `timeline`.
        memory: peak memory of each pipeline rank, predicted beside measured; empty where nobody looked.
        verdict: what the run came to, and what to do next; None where nothing is known.
        facts: what the run was; None for a plan.
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
    recorded: tuple[MeasuredTimeline, ...]
    parts: tuple[StepPart, ...]
    memory: tuple[MemoryRow, ...]
    verdict: Verdict | None
    facts: RunFacts | None
    steps: tuple[StepRecord, ...]
    peak_by_rank: tuple[float, ...]
    notes: tuple[str, ...]
    trace_file: str | None

    @property
    def measures_processes(self) -> bool:
        """Whether measured peaks are those of whole processes, as on CPUs, and not of a device's memory."""
        return on_cpus(self.plan)

    def to_dict(self) -> dict[str, Any]:
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
            "recorded_steps": [timeline.step for timeline in self.recorded],
            "parts": [
                {"kind": p.kind, "predicted_s": p.predicted, "measured_s": p.measured} for p in self.parts
            ],
            "memory": [
                {"rank": m.rank, "predicted_bytes": m.predicted, "measured_bytes": m.measured}
                for m in self.memory
            ],
            "verdict": None if self.verdict is None else {**asdict(self.verdict), "text": str(self.verdict)},
            "facts": None if self.facts is None else asdict(self.facts),
            "steps": [_of_step(step) for step in self.steps],
            "peak_by_rank_bytes": list(self.peak_by_rank),
            "notes": list(self.notes),
            "trace_file": self.trace_file,
        }
        if self.predicted is not None:
            stack = [memory.model_dump() for memory in self.predicted.stack]
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
    if not path.exists():
        raise UsageError(
            f"there is no {printable(str(path))}. Name a run folder or a plan file; runs: shardwright runs"
        )
    if path.suffix in (".yaml", ".yml"):
        raise UsageError(
            f"{printable(str(path))} is YAML, and plans are JSON. Machines: shardwright catalogue FILE; a "
            "plan for them: shardwright search MODEL FILE"
        )
    if not path.is_dir():
        return _put_together(path.stem, Plan.read(path), Records())
    folder = RunFolder(path.absolute())
    plan = Plan.read(folder.plan_file) if folder.plan_file.exists() else None
    records = read_steps(folder.metrics_file)
    if plan is None and not records:
        raise UsageError(
            f"{printable(str(path))} holds neither plan.json nor metrics.jsonl: it is no run folder, or the "
            "run ended before its first step. Name another: shardwright runs"
        )
    return _put_together(folder.path.name, plan, records, folder=folder)


def _of_step(step: StepRecord) -> dict[str, Any]:
    """A step for programs."""
    return {
        "step": step.step,
        "loss": step.loss,
        "step_s": step.seconds or None,
        "update_s": step.update_s,
        "peak_bytes": list(step.memory_bytes or ()),
        "limit_bytes": step.memory_limit_bytes,
        "tokens_per_s": step.tokens / step.seconds if step.tokens and step.seconds else None,
        "samples_per_s": step.samples / step.seconds if step.samples and step.seconds else None,
        "work_s": step.work_s,
        "bubble": step.bubble_measured,
        "outside_s": step.outside_s,
    }


def _put_together(
    name: str,
    plan: Plan | None,
    lines: Records,
    *,
    folder: RunFolder | None = None,
) -> ReportData:
    """Of a run in a folder, or of a plan alone."""
    where = "" if folder is None else show_path(folder.metrics_file)
    found = [record_of(line, where) for line in lines]
    totals = totals_of(found)
    # What is drawn needs numbers.
    steps = tuple(
        replace(step, loss=None) if step.loss is not None and not math.isfinite(step.loss) else step
        for step in found
    )
    recorded = () if folder is None else read_recorded(folder)
    facts = None if folder is None else read_facts(folder, totals)
    has_trace = folder is not None and folder.trace_file.exists()
    timeline = _most_typical(recorded, totals.step_s)
    num_ranks = plan.mesh.pipeline if plan is not None else _num_ranks(timeline)
    replay = None if plan is None or plan.prediction is None else play(base_setting(plan))
    limit_bytes = next((s.memory_limit_bytes for s in reversed(steps) if s.memory_limit_bytes), None)
    ranks = choose_ranks(num_ranks, important=_important(plan, replay))
    predicted = None
    spans: tuple[Span, ...] = ()
    if plan is not None and replay is not None:
        spans = simulated_spans(replay.simulation, factor=replay.setting.conditions.crowding)
        predicted = _predicted(plan, replay, spans, ranks, limit_bytes=limit_bytes)
    waterfall = None if predicted is None else predicted.waterfall
    parts = step_parts(
        plan,
        spans,
        waterfall,
        timeline,
        num_ranks=num_ranks,
        schedule_s=0.0 if predicted is None else predicted.step_s,
    )
    stage_seconds = {} if timeline is None else seconds_of_stages(timeline.spans)
    stages = _stage_ratios(plan, stage_seconds)
    peaks = peaks_by_rank(plan, steps)
    memory = memory_rows(_predicted_memory(plan), recorded, num_ranks=num_ranks)
    return ReportData(
        name=name,
        plan=plan,
        ranks=ranks,
        num_ranks=num_ranks,
        compared=compare_figures(plan, totals, peaks, memory),
        spent=spent_of(parts),
        stage_seconds=stage_seconds,
        predicted=predicted,
        timeline=None if timeline is None else _thinned(timeline, ranks),
        recorded=tuple(_thinned(each, ranks) for each in recorded),
        parts=parts,
        memory=memory,
        verdict=judge(plan, totals, parts, waterfall, stages),
        facts=facts,
        steps=steps,
        peak_by_rank=peaks,
        notes=(*_notes(plan, steps, timeline, run=facts is not None), *filter(None, [lines.left_out])),
        trace_file="trace.json" if has_trace else None,
    )


def _most_typical(recorded: Sequence[MeasuredTimeline], step_s: float) -> MeasuredTimeline | None:
    """The recorded step whose duration is nearest to that of a step; of two alike, the later one."""
    if not recorded:
        return None
    if not step_s:
        return recorded[-1]
    return min(reversed(recorded), key=lambda each: abs(each.seconds - step_s))


def _thinned(timeline: MeasuredTimeline, ranks: Sequence[int]) -> MeasuredTimeline:
    return replace(timeline, spans=thin(timeline.spans, ranks))


def _stage_ratios(
    plan: Plan | None, measured: Mapping[int, tuple[float, float]]
) -> tuple[tuple[int, float], ...]:
    """(stage, measured / predicted seconds of its work), where both are known."""
    stages = () if plan is None or plan.prediction is None else plan.prediction.stages
    found = []
    for number, stage in enumerate(stages):
        predicted_s = stage.forward_s + stage.backward_s
        if number in measured and predicted_s > 0:
            found.append((number, sum(measured[number]) / predicted_s))
    return tuple(found)


def _predicted(
    plan: Plan, replay: Replay, spans: Sequence[Span], ranks: Sequence[int], *, limit_bytes: float | None
) -> Predicted:
    assert plan.prediction is not None
    memory: tuple[RankMemory, ...] = ()
    stack, factor = _predicted_memory(plan), replay.setting.conditions.crowding
    if stack:
        rows = memory_over_time(replay.simulation, replay.setting.costs, stack)
        memory = tuple(rows[rank] for rank in ranks)
    return Predicted(
        waterfall=break_down(plan),
        update_s=plan.prediction.update_s,
        step_s=replay.simulation.step_s * factor,
        idle_s=tuple(seconds * factor for seconds in replay.idle_s),
        spans=thin(spans, ranks),
        memory=tuple(
            replace(row, moments=tuple((at_s * factor, held) for at_s, held in row.moments)) for row in memory
        ),
        stack=stack,
        limit_bytes=plan.prediction.conditions.memory_limit_bytes or limit_bytes or 0,
    )


def _predicted_memory(plan: Plan | None) -> tuple[MemoryPrediction, ...]:
    """The predicted memory of every pipeline rank; nothing where an edited plan lacks some."""
    if plan is None or plan.prediction is None:
        return ()
    memory = plan.prediction.memory
    return memory if len(memory) == plan.mesh.pipeline else ()


def _important(plan: Plan | None, replay: Replay | None) -> set[int]:
    """The ranks with most work and with most memory."""
    found: set[int] = set()
    if replay is not None:
        busy_s = replay.simulation.busy_s
        found.add(busy_s.index(max(busy_s)))
    memory = _predicted_memory(plan)
    if memory:
        found.add(max(range(len(memory)), key=lambda rank: memory[rank].peak_bytes))
    return found


def _num_ranks(timeline: MeasuredTimeline | None) -> int:
    return 1 if timeline is None else max(span.rank for span in timeline.spans) + 1


def _notes(
    plan: Plan | None, steps: Sequence[StepRecord], timeline: MeasuredTimeline | None, *, run: bool
) -> tuple[str, ...]:
    found = []
    if plan is None:
        found.append(
            "This run has no plan, so nothing was predicted: it has one stage. "
            "Set plan_one_stage to predict such runs, too."
        )
    elif plan.prediction is None:
        found.append("The plan predicts nothing: it was written by hand, or its prediction was removed.")
    if run and timeline is None:
        found.append("No step was recorded, so no timeline was measured.")
    if run and not steps:
        found.append("No step was done, so nothing was measured.")
    if run and steps and not any(step.memory_bytes for step in steps):
        found.append("The run measured no memory.")
    return tuple(found)

"""The figures of a run that stand beside their predictions."""

from collections.abc import Mapping, Sequence
from statistics import median

from shardwright.mesh import Mesh
from shardwright.observe.report.gathered.compared import Compared
from shardwright.observe.report.gathered.measured import MeasuredTimeline, StepMetrics
from shardwright.observe.report.gathered.memory_rows import MemoryRow
from shardwright.observe.report.gathered.spans import WORK, Span, simulated_spans
from shardwright.observe.report.gathered.verdict import typical_step_s
from shardwright.plan import Plan
from shardwright.planner.explain.plan_replay import Replay

__all__ = ["compare_figures", "compare_spent", "on_cpus", "peaks_by_rank"]


def compare_figures(
    plan: Plan | None, steps: Sequence[StepMetrics], peaks: Sequence[float], rows: Sequence[MemoryRow]
) -> tuple[Compared, ...]:
    """Step time, the optimizer's update and peak memory."""
    prediction = plan.prediction if plan is not None else None
    updates = [step.update_s for step in steps if step.update_s is not None]
    return (
        Compared("step time (s)", prediction.step_s if prediction else None, typical_step_s(steps)),
        Compared(
            "optimizer's update (s)",
            prediction.update_s or None if prediction else None,
            median(updates) if updates else None,
        ),
        _peak_memory(plan, peaks, rows),
    )


def _peak_memory(plan: Plan | None, peaks: Sequence[float], rows: Sequence[MemoryRow]) -> Compared:
    """What a device has allocated, or what a step has in use without the process around it."""
    name = "peak memory (bytes)"
    memory = () if plan is None or plan.prediction is None else plan.prediction.memory
    predicted = max((part.peak_bytes for part in memory), default=None)
    if not on_cpus(plan):
        return Compared(name, predicted, max(peaks, default=None))
    known = [row for row in rows if row.measured is not None]
    if known:
        most = max(known, key=lambda row: row.measured or 0.0)
        return Compared("memory without temporaries (bytes)", most.predicted, most.measured)
    return Compared(name, predicted, max(peaks, default=None), _WHOLE_PROCESS if peaks else "")


_WHOLE_PROCESS = "measured of the whole process: Python and its libraries are a part of it"


def on_cpus(plan: Plan | None) -> bool:
    """Whether a run's ranks compute on the cores of their hosts; of a run without a plan, it is taken so."""
    if plan is None or plan.prediction is None:
        return True
    conditions = plan.prediction.conditions
    return conditions is not None and conditions.cores > 0


def compare_spent(
    replay: Replay | None, timeline: MeasuredTimeline | None, num_ranks: int
) -> tuple[Compared, ...]:
    """Forward with code outside of the model, backward, and the rest of the schedule, in which ranks wait."""
    forward_s, *others = _means(() if replay is None else simulated_spans(replay.simulation), num_ranks)
    measured = _means(() if timeline is None else timeline.spans, num_ranks)
    names = ("forward (s)", "backward (s)", "waiting and idle (s)")
    return tuple(map(Compared, names, (forward_s, *others), measured))


def _means(spans: Sequence[Span], num_ranks: int) -> tuple[float | None, ...]:
    if not spans:
        return (None, None, None)
    sums = {"forward": 0.0, "backward": 0.0}
    for span in spans:
        if span.kind in WORK:
            sums[WORK[span.kind]] += (span.end_s - span.start_s) / num_ranks
    end_s = max((span.end_s for span in spans if span.kind in WORK), default=0.0)
    if not end_s:
        return (None, None, None)  # nothing but waiting was recorded
    return sums["forward"], sums["backward"], end_s - sum(sums.values())


def peaks_by_rank(plan: Plan | None, steps: Sequence[StepMetrics]) -> tuple[float, ...]:
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

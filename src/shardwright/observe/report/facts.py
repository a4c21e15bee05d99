"""What a run was, and its figures that stand beside their predictions.

What a process uses has more in it than a plan predicts: the interpreter, libraries, data of the script. A
recorded step tells how much that is, so it is taken off::

    in use at the end of each action  -  in use after the step  +  parameters, gradients, optimizer state
                                      └── what was there beside the training ──┘

Temporaries of an operation are gone at the end of its action, so the prediction to compare with is that
without them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from shardwright.config import Config
from shardwright.errors import UsageError
from shardwright.files import UserFile
from shardwright.observe.goodput import Spent
from shardwright.observe.metrics import StepRecord, read_json_lines, read_last
from shardwright.observe.report.measured import MeasuredTimeline
from shardwright.observe.report.parts import Beside, Compared
from shardwright.observe.run_folder import RunFolder
from shardwright.observe.run_record import read_record
from shardwright.observe.summary import RunTotals
from shardwright.observe.surroundings import without_secrets
from shardwright.plan import MemoryPrediction, Plan

_UNSHOWN = frozenset({"run_dir", "run_name", "ignored"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What a run was; empty where it is not known.

    Attributes:
        microbatches: how they were run at its end.
        begun: when it began or went on last, in UTC.
        slow_rank: the rank that the others waited for most, and for which share of their time.
        settings: those that are not the defaults, by name.
    """

    model: str = ""
    command: str = ""
    state: str = ""
    microbatches: str = ""
    begun: str = ""
    spent: str = ""
    slow_rank: str = ""
    machine: Mapping[str, str]
    versions: Mapping[str, str]
    commit: str = ""
    settings: Mapping[str, str]

    def rows(self) -> list[tuple[str, str]]:
        """Names and values, as a page lists them; what is not known is left out."""
        joined = {name: f"{name} {version}" for name, version in self.versions.items()}
        rows = [
            ("command", self.command),
            ("state", self.state),
            ("begun", self.begun),
            ("time", self.spent),
            ("waited for", self.slow_rank),
            ("model", self.model),
            ("microbatches", self.microbatches),
            *self.machine.items(),
            ("versions", ", ".join(joined.values())),
            ("commit", self.commit),
            ("settings", ", ".join(f"{name} = {value}" for name, value in self.settings.items())),
        ]
        return [(name, value) for name, value in rows if value]


def read_facts(folder: RunFolder, totals: RunTotals) -> RunFacts:
    """What the files of a run tell; a file that cannot be read tells nothing."""
    record = read_record(folder)
    surroundings = _events(folder)
    begun_s = 0.0 if record is None else record.begun_s
    command = "" if record is None else record.command or " ".join((record.script, *record.arguments))
    return RunFacts(
        model=_text(surroundings.get("model")),
        command=without_secrets(command),
        microbatches=_text(surroundings.get("microbatches")),
        # A run writes its report before its launcher writes how it ended.
        state="" if record is None or record.state == "running" else record.state,
        begun=datetime.fromtimestamp(begun_s, UTC).strftime("%Y-%m-%d %H:%M UTC") if begun_s else "",
        spent=_spent(read_last(folder.metrics_file)),
        slow_rank=totals.slowest,
        machine=_texts(surroundings.get("machine")),
        versions=_texts(surroundings.get("versions")),
        commit=_text(surroundings.get("commit")),
        settings=_settings(folder),
    )


def _spent(lines: Sequence[dict[str, Any]]) -> str:
    try:
        return str(Spent.of_metrics(lines) or "")
    except UsageError:
        return ""


def _events(folder: RunFolder) -> dict[str, Any]:
    """The fields of the last event of each kind that tells about the run."""
    if not folder.events_file.is_file():
        return {}
    found: dict[str, Any] = {}
    try:
        events = read_json_lines(folder.events_file)
    except UsageError:
        return {}
    for event in events:
        if event.get("kind") in ("surroundings", "model_known", "microbatches_run"):
            found |= event
    return found


def _settings(folder: RunFolder) -> dict[str, str]:
    if not folder.config_file.is_file():
        return {}
    try:
        document = UserFile(folder.config_file, what="", error=UsageError).read_json()
    except UsageError:
        return {}
    if not isinstance(document, dict):
        return {}
    defaults = Config.parse({}).model_dump(mode="json")
    return {
        str(name): "off" if value is False else "on" if value is True else str(value)
        for name, value in document.items()
        if name not in _UNSHOWN and value != defaults.get(name)
    }


def _texts(value: object) -> dict[str, str]:
    return {str(name): str(each) for name, each in value.items()} if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow(Beside):
    """The peak of one pipeline rank, in bytes; None where it is not known.

    Attributes:
        measured: the same, at the end of the action where it was most.
    """

    rank: int


def memory_rows(
    stack: Sequence[MemoryPrediction], timelines: Sequence[MeasuredTimeline], *, num_ranks: int
) -> tuple[MemoryRow, ...]:
    """The peak of every rank, in the recorded step where it was most."""
    measured: dict[int, float] = {}
    for timeline in timelines:
        for rank, other_bytes in timeline.other_bytes.items():
            peak = max((in_use for _, in_use in timeline.memory.get(rank, ())), default=0.0)
            if peak:
                measured[rank] = max(measured.get(rank, 0.0), peak - other_bytes)
    if not measured:
        return ()
    return tuple(
        MemoryRow(rank=rank, predicted=_at_ends(stack[rank]) if stack else None, measured=measured.get(rank))
        for rank in range(num_ranks)
    )


def _at_ends(memory: MemoryPrediction) -> float:
    return (
        memory.parameters_bytes + memory.gradients_bytes + memory.optimizer_bytes + memory.activations_bytes
    )


def compare_figures(
    plan: Plan | None, totals: RunTotals, peaks: Sequence[float], rows: Sequence[MemoryRow]
) -> tuple[Compared, ...]:
    """Step time, the optimizer's update and peak memory."""
    prediction = plan.prediction if plan is not None else None
    return (
        Compared("step time (s)", prediction.step_s if prediction else None, totals.step_s or None),
        Compared(
            "optimizer's update (s)",
            prediction.update_s or None if prediction else None,
            totals.median("update_s"),
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
    return plan is None or plan.prediction is None or plan.prediction.conditions.cores > 0


def peaks_by_rank(plan: Plan | None, steps: Sequence[StepRecord]) -> tuple[float, ...]:
    """Measured peak of each pipeline rank: the largest over its replicas and over all steps."""
    by_rank: Mapping[int, float] = {}
    for step in steps:
        peaks = enumerate(step.memory_bytes or ())
        by_rank = {rank: max(peak, by_rank.get(rank, 0.0)) for rank, peak in peaks} or by_rank
    mesh = None if plan is None else plan.mesh.grid
    if mesh is None or len(by_rank) != mesh.world_size:
        return tuple(by_rank.values())
    found = [0.0] * mesh.pipeline
    for rank, peak in by_rank.items():
        where = mesh.group_rank("pp", rank)
        found[where] = max(found[where], peak)
    return tuple(found)

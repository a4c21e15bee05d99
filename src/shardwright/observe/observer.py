"""Routes what a front end reports about a run to files, console, trackers, and a report at its end.

::

    config_resolved ──► config.json
    plan_made ────────► plan.json, the console
    step_done ────────► metrics.jsonl, the console, trackers
    recorded ─────────► steps.json
    timeline ─────────► trace.json
    close ────────────► report.html
    event ────────────► events.jsonl

Every rank has an observer and reports the same to it; one of them writes and prints, the others are silent.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from types import TracebackType
from typing import Any, Self

from shardwright.config import Config
from shardwright.errors import ShardwrightError
from shardwright.observe.console import Console, Phase, Progress
from shardwright.observe.goodput import Goodput
from shardwright.observe.metrics import JsonLines, MetricsLog, StepRecord, metrics_of, read_last
from shardwright.observe.plan_text import format_plan_briefly
from shardwright.observe.recorded_steps import RecordedStep, StepsFile
from shardwright.observe.run_folder import RunFolder, show_path
from shardwright.observe.run_record import read_record
from shardwright.observe.summary import RunTotals, format_end
from shardwright.observe.timeline import MeasuredEvent, chrome_trace
from shardwright.observe.trackers import Run, Tracker, Tracking, check_installed, named_trackers
from shardwright.plan import Plan
from shardwright.schedule import Simulation

_MOST_ACTIONS = 10_000
"""Of a schedule that is played out at the end of a run: a second or so, for which the others wait."""


def write_at_end(
    folder: RunFolder, *, plan: Plan | None, console: Console, event: Callable[..., None]
) -> None:
    """Writes ``report.html``, or says why not and how to get it."""
    again = f"shardwright report {show_path(folder.path)}"
    if find_spec("plotly") is None:
        reason = "plotly is not installed. Run: pip install 'shardwright[report]'"
    elif plan is not None and 2 * len(plan.stages) * plan.schedule.microbatches > _MOST_ACTIONS:
        reason = "the schedule is long, and the run is not to wait for it"
    else:
        try:
            # Imported when it is needed: at the end of runs that write one.
            from shardwright.observe.report import write_report

            write_report(folder.path, folder.report_file)
        except Exception as error:  # whatever it is, the training is done and must not fail for a page
            told = str(error).rstrip(".")
            reason = told if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {told}"
        else:
            event("report_written")
            return
    event("report_not_written", reason=reason)
    console.status(f"no report.html: {reason}. To write it: {again}")


class Observer:
    """Reports a run.

    Attributes:
        folder: the run folder; None where no files are written.
        going_on: how to go on with the run at its end; empty where nothing was saved.
    """

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world_size: int,
        pipeline_ranks: Sequence[int],
        folder: RunFolder | None,
        prints: bool,
        console: Console | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        check_installed(config.trackers)
        self.folder = folder
        self.console = console if console is not None else Console(prints=prints)
        self._rank = rank
        self._world_size = world_size
        self._pipeline_ranks = tuple(pipeline_ranks)
        self._wall = wall
        self._plan: Plan | None = None
        self._totals = RunTotals()
        self.going_on: Callable[[], str] = lambda: ""
        self._progress = Progress(
            self.console,
            log_interval=config.log_interval,
            world_size=world_size,
            total_steps=config.steps,
        )
        self._written = folder if prints else None
        self._report = config.report
        self._closed = self._told_of_folder = False
        self._metrics: MetricsLog | None = None
        self._events: JsonLines | None = None
        self._tracking: Tracking | None = None
        self._steps = None if self._written is None else StepsFile(self._written)
        if self._written is not None:
            self._metrics = MetricsLog(self._written.metrics_file, world_size=world_size, wall=wall)
            self._events = JsonLines(self._written.events_file)
        self._goodput = _goodput_of(self._written, wall()) if prints else None
        if prints:
            self._tracking = Tracking(_run(config, self._written, world_size), self._tracker_failed)
            self._tracking.add(named_trackers(config.trackers))

    def track(self, trackers: Sequence[Tracker]) -> None:
        """Has further trackers told of each step, on the rank that writes."""
        if self._tracking is not None:
            self._tracking.add(trackers)

    def config_resolved(self, config: Config) -> None:
        """The settings are known, what the launcher said included."""
        if self._written is not None:
            with self._as_far_as_it_goes():
                self._written.write(self._written.config_file.name, config.to_json())
        self.event("config_resolved", world_size=self._world_size)

    def plan_made(self, plan: Plan) -> None:
        """The plan is known: made, or read from a file. Said once for each plan."""
        if plan == self._plan:
            return
        self._plan = plan
        why = [] if self._written is None else [f"  why: shardwright explain {show_path(self._written.path)}"]
        self.console.line("\n".join([format_plan_briefly(plan), *why]))
        if self._written is not None:
            with self._as_far_as_it_goes():
                self._written.write(self._written.plan_file.name, plan.to_json())
        self.event(
            "plan_made",
            schedule=plan.schedule.kind,
            microbatches=plan.schedule.microbatches,
            stages=len(plan.stages),
        )

    def step_done(self, record: StepRecord) -> None:
        self._totals.add(record)
        goodput = {} if self._goodput is None else self._goodput.step_done(record, self._wall())
        if self._metrics is not None:
            with self._as_far_as_it_goes():
                self._metrics.append(record, goodput)
            if self._totals.steps == 1 and self._metrics.kept is not None:
                kept = show_path(self._metrics.kept)
                self.console.status(f"the metrics of the run before in this folder are kept in {kept}")
        if self._tracking is not None and self._tracking.has_any:
            metrics = metrics_of(record, world_size=self._world_size)
            self._tracking.log({**metrics, **goodput}, step=record.step)
        self._progress.step_done(record)

    def recorded(self, step: RecordedStep) -> None:
        """A step was gathered with the times of its actions; an early one and the last stay in the file."""
        if self._steps is not None:
            with self._as_far_as_it_goes():
                self._steps.add(step)

    def timeline(
        self,
        events: Sequence[MeasuredEvent],
        simulation: Simulation | None,
        *,
        step: int | None = None,
    ) -> None:
        """The timeline of a step was gathered; the last one stays in the file."""
        if self._written is None:
            return
        trace = chrome_trace(
            events,
            simulation=simulation,
            world_ranks=self._pipeline_ranks,
            info={} if step is None else {"step": step},
        )
        with self._as_far_as_it_goes():
            self._written.write(self._written.trace_file.name, json.dumps(trace) + "\n")
        self.event("timeline_written", step=step)

    def event(self, kind: str, **fields: Any) -> None:
        """Something happened that a person may look for later."""
        if self._goodput is not None:
            self._goodput.event(kind, fields)
        if self._events is not None:
            now = datetime.fromtimestamp(self._wall(), UTC).isoformat(timespec="milliseconds")
            with self._as_far_as_it_goes():
                self._events.append({"time": now, "kind": kind, "rank": self._rank, **fields})

    def status(self, text: str) -> None:
        self.console.status(text)

    def phase(self, text: str) -> AbstractContextManager[Phase]:
        """Announces something that may take longer than 2 s; see `Console.phase`."""
        return self.console.phase(text)

    def close(self, *, ended: str = "done", reports: bool = True) -> None:
        """Writes the report, says what the run came to, and closes all files; may be called twice."""
        self._progress.flush()
        written = self._written if self._totals.steps and not self._closed else None
        written = written if written is not None and written.path.is_dir() else None
        if self._report and reports and written is not None:
            write_at_end(written, plan=self._plan, console=self.console, event=self.event)
        if self._totals.steps and not self._closed:
            report = written.report_file if written is not None and reports else None
            further = [f"report {show_path(report)}"] if report is not None and report.is_file() else []
            if written is not None and (going_on := self.going_on()):
                further.append(going_on)
            spent = self._goodput
            told = [str(spent.spent)] if spent is not None and spent.is_worth_telling else []
            self.console.line(
                format_end(
                    self._totals,
                    self._plan,
                    ended=ended,
                    further=further,
                    spent=told,
                )
            )
        self._closed = True
        for file in (self._tracking, self._metrics, self._events):
            if file is not None:
                with self._as_far_as_it_goes():
                    file.close()
        self._tracking = self._metrics = self._events = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _as_far_as_it_goes(self) -> Iterator[None]:
        """Says once where the run folder has gone, or its disk is full: no training ends for its journal."""
        try:
            yield
        except OSError as error:
            if self._told_of_folder or self._written is None:
                return
            self._told_of_folder = True
            gone = not self._written.path.is_dir()
            why = "it has gone, deleted or moved" if gone else error.strerror or str(error)
            self.status(
                f"the run folder {show_path(self._written.path)} cannot be written any more: {why}. The run "
                "goes on, and what cannot be written there is lost."
            )

    def _tracker_failed(self, message: str) -> None:
        self.event("tracker_failed", message=message)
        self.status(message)


def _goodput_of(folder: RunFolder | None, now_s: float) -> Goodput:
    record = None if folder is None else read_record(folder)
    before = [] if folder is None else read_last(folder.metrics_file)
    return Goodput(record.begun_s if record is not None and record.begun_s else now_s, before)


def _run(config: Config, folder: RunFolder | None, world_size: int) -> Run:
    """What trackers are told of a run."""
    return Run(
        name="run" if folder is None else folder.path.name,
        folder=None if folder is None else folder.path,
        settings=json.loads(config.to_json()),
        world_size=world_size,
    )

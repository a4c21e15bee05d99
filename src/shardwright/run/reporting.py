"""Reports plan, steps and timelines to the observer."""

import atexit
import logging
import os
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from shardwright import __version__
from shardwright.observe.console import Phase
from shardwright.observe.metrics import StepRecord
from shardwright.observe.observer import Observer
from shardwright.observe.run_folder import RunFolder, launched_folder, runs_dir
from shardwright.observe.run_record import (
    BegunRun,
    RunState,
    begin_run,
    command_of_script,
    go_on,
    going_further,
    read_record,
    saved_step,
)
from shardwright.observe.stragglers import Stragglers
from shardwright.observe.surroundings import surroundings
from shardwright.observe.timeline import Row, idle_share
from shardwright.observe.trackers import Tracker
from shardwright.plan import Plan
from shardwright.run.context import Context
from shardwright.run.launch_settings import settings_from
from shardwright.run.machine import device_name, memory_of_rank
from shardwright.run.memory import peak_memory
from shardwright.run.step_recording import BatchRecord, StepRecording
from shardwright.runtime.action_loop import note_end_of_step

NO_FOLDER = "off"

log = logging.getLogger(__name__)

FIGURES = ("busy_s", "pipeline_s", "memory_bytes", "records_next", "between_s", "held_up_s")
"""What a rank tells the others of each step: seconds of work, and from the first action to the last; its peak
of memory; whether it would have the next step recorded, of which the first rank's word counts; seconds from
the step before to this one; seconds for which its process stood still."""


def _unknown() -> None:
    """Of a fact that a front end does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a front end knows of a script, asked for when steps end.

    Attributes:
        update_s: seconds of updates since the last step.
        state_bytes: of parameters, gradients, and what optimizers keep, on this rank.
    """

    model: Callable[[], str]
    learning_rate: Callable[[], float | None] = _unknown
    update_s: Callable[[], float | None] = _unknown
    state_bytes: Callable[[], int | None] = _unknown


class Reporter:
    """Reports a run; every rank has one, the first rank's writes and prints.

    The run folder is made at the first report, so that a script that fails before leaves none.

    Attributes:
        calls_steps: a step function was called, to train or to evaluate.
        begun_s: when this rank began a step, before it waited for others; on `time.perf_counter`.
    """

    def __init__(self, context: Context, facts: Facts):
        self._context = context
        self._facts = facts
        self._observer: Observer | None = None
        self._begun: BegunRun | None = None
        self._trackers: list[Tracker] = []
        self._recording = StepRecording(context, state_bytes=facts.state_bytes)
        self._run_as = ""
        self._model_is_unknown = True
        self.num_steps = 0
        self.calls_steps = False
        self._ends_saved = False
        self._step_s, self._peak_bytes = 0.0, 0
        self.begun_s = self._ended_s = self._held_up_s = 0.0
        mesh = context.mesh
        self._stragglers = Stragglers(
            [mesh.group_rank("pp", rank) for rank in range(mesh.world_size)], mesh.groups("share")
        )
        # Scripts that end without shutdown() leave a report, too.
        atexit.register(self.close)

    @property
    def observer(self) -> Observer:
        """The observer; the first access is collective over all ranks."""
        if self._observer is None:
            self._observer = self._start()
        return self._observer

    @property
    def folder(self) -> RunFolder | None:
        """The run folder; the first access is collective over all ranks."""
        return self.observer.folder

    def track(self, tracker: Tracker) -> None:
        """Has a tracker told of each step from now on."""
        if self._observer is None:
            self._trackers.append(tracker)
        else:
            self._observer.track([tracker])

    def phase(self, text: str) -> AbstractContextManager[Phase]:
        """Announces something that may take a while; collective at the first time."""
        return self.observer.phase(text)

    def plan_made(self, plan: Plan) -> None:
        """The plan is in force; collective."""
        self._stragglers.follow(plan)
        self.observer.plan_made(plan)

    def attention_known(self, table: str) -> None:
        """The first training step has shown what computes the attention of each layer; collective."""
        if table:
            self.observer.console.line(f"attention\n{table}")

    def step_done(
        self,
        step: BatchRecord,
        figures: Sequence[Sequence[float]],
        *,
        seconds: float,
        loss: float | None,
        skipped: int = 0,
    ) -> None:
        """A training step ended; collective."""
        context = self._context
        self.num_steps += 1
        number = self.num_steps
        observer = self.observer
        prediction = context.plan.prediction if context.plan else None
        busy_s, pipeline_s, memory, records_next, between_s, held_up_s = list(zip(*figures, strict=True))[
            : len(FIGURES)
        ]
        self._ended_s = time.perf_counter()
        slow = None
        if context.rank == 0:
            slow = self._stragglers.step(
                number, seconds=seconds, work_s=busy_s, between_s=between_s, held_up_s=held_up_s
            )
        num_replicas = context.mesh.data
        observer.step_done(
            StepRecord(
                step=number,
                seconds=seconds,
                loss=loss,
                samples=step.samples * num_replicas,
                tokens=None if step.tokens is None else step.tokens * num_replicas,
                flops=3.0 * step.flops * num_replicas or None,
                bubble_measured=self._idle_share(busy_s, pipeline_s),
                bubble_predicted=prediction.bubble if prediction else None,
                step_predicted_s=prediction.step_s if prediction else None,
                memory_bytes=tuple(map(int, memory)),
                memory_limit_bytes=context.config.memory_limit or self._device_memory,
                learning_rate=self._facts.learning_rate(),
                work_s=sum(busy_s[rank] for rank in context.pipeline_ranks) or None,
                outside_s=step.outside_s or None,
                update_s=self._facts.update_s(),
                skipped_updates=skipped or None,
                slow_rank=slow.rank if slow is not None and slow.excess_s else None,
                slow_s=slow.excess_s or None if slow is not None else None,
            )
        )
        if slow is not None and slow.told:
            observer.event("slow_rank", step=number, slow=slow.rank, seconds=slow.excess_s, told=slow.told)
            observer.status(slow.told)
        if self._model_is_unknown:
            self._model_is_unknown = False
            observer.event("model_known", model=self._facts.model())
        if step.run_as != self._run_as:
            self._run_as = step.run_as
            observer.event("microbatches_run", microbatches=step.run_as, step=number)
        self._recording.step_done(step, number=number, seconds=seconds, observer=observer)
        self._recording.asked_after(number, bool(records_next[0]))
        if context.watch.whereabouts is not None:
            context.watch.whereabouts.steps = number
        note_end_of_step(number)
        self._step_s, self._peak_bytes = seconds, int(memory[context.rank])
        self._note_progress()

    def ends_after_save(self) -> None:
        """A signal came, and the run has saved and ends."""
        self._ends_saved = True
        self._note_progress()

    def _note_progress(self) -> None:
        pulse = self._context.watch.pulse
        if pulse is not None:
            pulse.page.progress(
                self.num_steps,
                has_saved=self._ends_saved,
                step_s=self._step_s,
                memory_bytes=self._peak_bytes,
            )

    def close(self) -> None:
        """The run is over."""
        atexit.unregister(self.close)
        state = self._state()
        if state == "finished" and not self.calls_steps and self._context.rank == 0:
            self._point_out_no_steps()
        if self._observer is not None:
            told = {"finished": "done", "saved": "stopped"}.get(state, state)
            self._observer.close(ended=told, reports=state != "failed" or not _starts_again())
            self._write_end(state)

    @property
    def draws_next_step(self) -> bool:
        """Whether the timeline of the step that comes next, or is going on, will be asked for."""
        return self._context.config.run_dir != NO_FOLDER and self._recording.wants(self.num_steps + 1)

    def figures_of(self, row: Row) -> list[float]:
        """This rank's `FIGURES` of the step that ends."""
        busy_s = sum(end_s - start_s - waited_s for _, start_s, end_s, waited_s in row)
        pipeline_s = row[-1][2] - row[0][1] if row else 0.0
        between_s = self.begun_s - self._ended_s if self._ended_s else 0.0
        pulse = self._context.watch.pulse
        told_s, self._held_up_s = self._held_up_s, pulse.held_up_s if pulse is not None else 0.0
        asks = self._recording.asks_after(self.num_steps + 1)
        return [busy_s, pipeline_s, peak_memory(), asks, between_s, self._held_up_s - told_s]

    # ---- inside ----

    def _point_out_no_steps(self) -> None:
        if self._context.optimizers:  # else it may only have converted a model
            log.warning(
                "the script ends, and has called no step function: its loop had no batch (an empty loader, "
                "or one that drops its only batch as too small), or all its steps were done before."
            )

    def _start(self) -> Observer:
        context = self._context
        folder = context.from_first_rank(self._new_folder)
        observer = Observer(
            context.config,
            rank=context.rank,
            world_size=context.mesh.world_size,
            pipeline_ranks=context.pipeline_ranks,
            folder=RunFolder(Path(folder)) if folder else None,
            prints=context.rank == 0,
        )
        if context.watch.pulse is not None and (kept := launched_folder() or observer.folder) is not None:
            context.watch.pulse.keep_in(kept.path, world_size=context.mesh.world_size)
        observer.config_resolved(context.config)
        observer.event(
            "surroundings",
            **surroundings(Path(sys.argv[0]), own_version=__version__, device=device_name(context.device)),
        )
        observer.going_on = self._going_on
        observer.track(self._trackers)
        if self._begun is not None:
            for line in self._begun.told:
                observer.status(line)
        return observer

    def _new_folder(self) -> str | None:
        config = self._context.config
        if config.run_dir == NO_FOLDER:
            return None
        folder = launched_folder()
        if folder is not None:
            folder.hold("metrics")
            record = read_record(folder)
            if record is not None and record.state != "running":  # by a host that has left
                record.begun(folder)
            return str(folder.path)
        # No launcher of ours has begun the run.
        self._begun = begin_run(
            runs_dir(config.run_dir),
            command_of_script(
                sys.argv,
                settings=dict(ChainMap(*(dict(layer) for layer in reversed(settings_from(os.environ))))),
                world_size=self._context.mesh.world_size,
            ),
            name=config.run_name,
            part="metrics",
            resume_by="set run_name to its name",
        )
        return str(self._begun.folder.path)

    def _state(self) -> RunState:
        """How the run ends."""
        # The error on its way, where a `finally` shuts down; at exit, the one that ended the script.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if self._ends_saved:
            return "saved"
        if error is None:
            return "finished"
        return "stopped" if isinstance(error, KeyboardInterrupt) else "failed"

    def _going_on(self) -> str:
        """How to go on with a run that came to its end; whoever began it says so for one that did not."""
        folder = self.observer.folder
        saved = None if folder is None or self._state() != "finished" else saved_step(folder)
        if folder is None or saved is None:
            return ""
        if self._begun is not None:
            return f"saved {saved}; for more steps: run_name {folder.path.name}"
        record = read_record(folder)
        how = "shardwright run --resume" if record is None else going_further(record)
        return f"saved {saved}; for more steps: {how}"

    def _write_end(self, state: RunState) -> None:
        """Writes how the run ended, and says how to go on with one that ended early: on the first rank."""
        if self._begun is None:
            return
        record = self._begun.record.ended_as(self._begun.folder, state)
        how = "" if state == "finished" else go_on(self._begun.folder, record)
        if how and self._observer is not None:
            self._observer.status(how)
        self._begun = None

    @cached_property
    def _device_memory(self) -> int | None:
        """Memory that a rank has; a run that follows a plan has not looked at its machines."""
        cluster = self._context.cluster
        return (memory_of_rank(self._context) if cluster is None else cluster.device.memory_bytes) or None

    def _idle_share(self, busy_s: Sequence[float], pipeline_s: Sequence[float]) -> float | None:
        """Of the ranks of this replica; None where it has one."""
        replica = self._context.pipeline_ranks
        longest = max(pipeline_s[rank] for rank in replica) if len(replica) > 1 else 0.0
        return idle_share([busy_s[rank] for rank in replica], step_s=longest) if longest else None


def _starts_again() -> bool:
    """Whether the launcher starts the ranks again after a failure; its report is that of the next life."""
    count, most = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RESTART_COUNT", "MAX_RESTARTS"))
    return count.isdigit() and most.isdigit() and int(count) < int(most)

"""The end of each training step: ranks exchange what they did, and the first one writes it down.

As in PyTorch, a row of figures a rank goes to all ranks after each step. The times of all actions, which are
kept in ``steps.json``, are gathered for a few steps alone: see `shardwright.observe.recorded_steps`.
"""

import statistics
import time
from collections.abc import Sequence

import torch

from shardwright.comm.message_names import Purpose
from shardwright.run.context import Context
from shardwright.run.reporting import Reporter
from shardwright.run.step_recording import BatchRecord
from shardwright.runtime.action_loop import MeasuredRow
from shardwright.runtime.batch_schedules import merged_edges
from shardwright.schedule import Schedule
from shardwright.tensorflow.batch import Arguments
from shardwright.tensorflow.program import Program


class StepEnd:
    """The end of every training step."""

    def __init__(self, context: Context):
        self._context = context

    @property
    def watches_memory(self) -> bool:
        """Whether the memory in use after each action of the next step will be asked for."""
        return self._reporter.draws_next_step

    def come(
        self,
        arguments: Arguments,
        *,
        losses: Sequence[float],
        programs: Sequence[Program],
        schedule: Schedule | None,
        row: MeasuredRow,
        begun_s: float,
    ) -> None:
        """A training step has ended on this rank; collective over all ranks."""
        reporter, world = self._reporter, self._context.links.world
        record = BatchRecord(
            samples=arguments.num_samples or 0,
            tokens=arguments.num_tokens,
            row=row.events,
            memory=row.memory,
            schedule=schedule,
            edges=merged_edges(programs) if self.watches_memory and schedule is not None else (),
        )
        seconds = time.perf_counter() - begun_s
        figures = reporter.figures_of(record.row)
        own = torch.tensor(figures, dtype=torch.float64, device=self._context.device)
        rows = own[None] if world is None else world.gather(own, Purpose.FIGURES)
        loss = statistics.fmean(losses) if losses else None
        reporter.step_done(record, rows.tolist(), seconds=seconds, loss=loss)

    @property
    def _reporter(self) -> Reporter:
        reporter = self._context.reporter
        assert isinstance(reporter, Reporter)
        return reporter

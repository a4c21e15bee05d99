"""The end of each training step: ranks exchange what they did, and the first one writes it down.

As in PyTorch, a row of figures a rank goes to all ranks after each step. The times of all actions, which are
kept in ``steps.json``, are gathered for a few steps alone: see `shardwright.observe.recorded_steps`.
"""

import time
from collections.abc import Sequence

import torch

from shardwright.comm.identity.purpose import Purpose
from shardwright.runtime.action_loop import MeasuredRow
from shardwright.runtime.batch_programs import merged_edges
from shardwright.schedule import Schedule
from shardwright.tensorflow.batch import Arguments
from shardwright.tensorflow.program import Program
from shardwright.torch.batch.batch_result import BatchResult
from shardwright.torch.measuring.reporting import Reporter
from shardwright.torch.pytorch.memory_in_use import peak_memory
from shardwright.torch.run.context import Context

__all__ = ["StepEnd"]


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
        result = BatchResult(
            results=[],
            losses=[torch.tensor(losses)] if losses else [],
            samples=arguments.num_samples or 0,
            tokens=arguments.num_tokens,
            row=row.events,
            memory=row.memory,
            schedule=schedule,
            edges=merged_edges(programs) if self.watches_memory and schedule is not None else (),
        )
        seconds = time.perf_counter() - begun_s
        busy_s = sum(end - start - waited for _, start, end, waited in result.row)
        told = [busy_s, result.pipeline_s, peak_memory(), reporter.asks_to_record]
        own = torch.tensor(told, dtype=torch.float64, device=self._context.device)
        rows = own[None] if world is None else world.gather(own, Purpose.FIGURES)
        busy, pipeline, memory, asks = rows.T.tolist()
        reporter.step_done(
            result,
            seconds=seconds,
            busy_s=busy,
            pipeline_s=pipeline,
            memory=[int(num_bytes) for num_bytes in memory],
            records_next=bool(asks[0]),
        )
        if self._context.watch.whereabouts is not None:
            self._context.watch.whereabouts.steps = reporter.num_steps

    @property
    def _reporter(self) -> Reporter:
        reporter = self._context.reporter
        assert isinstance(reporter, Reporter)
        return reporter

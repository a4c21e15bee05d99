"""Gathers the measured actions of the ranks of a replica, for ``steps.json`` and timelines."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.comm.codec import declare
from shardwright.comm.joining.process_group import tell_all
from shardwright.observe.observer import Observer
from shardwright.observe.recorded_steps import ChosenSteps, RankMemoryAfter, RecordedStep
from shardwright.observe.timeline import MeasuredEvent, Row, measured_events
from shardwright.planner.replay import base_setting, play
from shardwright.run.context import Context
from shardwright.run.memory import memory_in_use
from shardwright.schedule import Action, Schedule, Simulation

declare(Action)

_TRACED_EVERY = 10
"""Steps between two timelines where no interval is set."""


@dataclass(frozen=True, kw_only=True)
class BatchRecord:
    """What a rank did in one batch.

    Attributes:
        tokens: in the batch of this replica; None if it is not made of tokens.
        flops: of the model's forward for the batch; 0 where they were not counted.
        row: what this rank did, action by action.
        outside_s: seconds of operations that rest on no unit, and that every rank of a pipeline runs; part of
            `row`, in no profile, and predicted as the last run measured them.
        memory: bytes in use at the end of each of them; empty where nobody asked.
        host_copies: (action, start, end) of copies of what units keep to the host and back.
        schedule: the order of work; None where it is none that has a name.
        run_as: whether microbatches are run from a list of calls, or why not; empty where that is not asked.
    """

    samples: int
    tokens: int | None
    flops: float = 0.0
    row: Row = ()
    outside_s: float = 0.0
    memory: Sequence[int] = ()
    host_copies: Sequence[tuple[Action, float, float]] = ()
    schedule: Schedule | None = None
    run_as: str = ""


class StepRecording:
    """Records some steps of a run, the same ones on all ranks."""

    def __init__(self, context: Context, *, state_bytes: Callable[[], int | None]):
        self._context = context
        self._state_bytes = state_bytes
        self._chosen = ChosenSteps(context.config.steps)

    def wants(self, number: int) -> bool:
        """Whether a step will be asked for the memory in use at the end of each action."""
        return self._chosen.wants(number) or self._draws(number)

    def step_done(
        self, step: BatchRecord, *, number: int, seconds: float, observer: Observer
    ) -> Sequence[MeasuredEvent]:
        """A training step ended; collective over the ranks of a replica.

        Returns its actions on all ranks, if it was chosen to be recorded; else nothing.
        """
        is_chosen, draws = self._chosen.wants(number), self._draws(number)
        self._chosen.done(number)
        if step.schedule is None or observer.folder is None or not (is_chosen or draws):
            return ()
        events, memory = self._gathered(step)
        if is_chosen:
            observer.recorded(RecordedStep.of(number, seconds, events, memory))
        if draws:
            observer.timeline(events, self._predicted(step), step=number)
        return events if is_chosen else ()

    def asks_after(self, number: int) -> bool:
        """Whether the step after this one is to be recorded, as far as this rank would have it."""
        return self._chosen.asks_after(number)

    def asked_after(self, number: int, asked: bool) -> None:
        """What the first rank would have: from now on that holds for all."""
        self._chosen.asked_after(number, asked)

    def _draws(self, number: int) -> bool:
        # The first step plans; the third is the first that an impatient user can look at.
        config = self._context.config
        return config.trace and (number == 3 or number % (config.log_interval or _TRACED_EVERY) == 0)

    def _gathered(self, step: BatchRecord) -> tuple[list[MeasuredEvent], list[RankMemoryAfter]]:
        context = self._context
        after = self._memory_after() if step.memory else RankMemoryAfter()
        own = (step.row, step.memory, tuple(step.host_copies), tuple(after))
        gathered: list[Any] = [own]
        if context.groups.pipeline is not None:
            gathered = tell_all(own, group=context.groups.pipeline)
        rows, memory, copies, ends = zip(*gathered, strict=True)
        # One clock on one host; the ranks of several are aligned by their first action.
        one_host = context.mesh.world_size == context.local_size
        starts = [row[0][1] if row else math.inf for row in rows]
        zeros = [min(starts)] * len(rows) if one_host else starts
        events = measured_events(rows, step_starts=zeros, memory=memory)
        events += measured_events([[(*copy, 0.0) for copy in row] for row in copies], step_starts=zeros)
        return events, [RankMemoryAfter(*end) for end in ends]

    def _predicted(self, step: BatchRecord) -> Simulation | None:
        """The step's order of work as the plan expects it; a smaller batch has fewer microbatches."""
        plan = self._context.plan
        assert step.schedule is not None
        if plan is None or plan.prediction is None or len(plan.stages) != step.schedule.num_stages:
            return None
        return play(replace(base_setting(plan), schedule=step.schedule)).simulation

    def _memory_after(self) -> RankMemoryAfter:
        """What the tensors of the training take on this rank, and all that is in use.

        Nothing is said where replicas share tensors: the rows of this rank are not those of its parameters.
        """
        context = self._context
        if context.mesh.shard > 1 or context.config.shard_optimizer_state:
            return RankMemoryAfter()
        state_bytes = self._state_bytes()
        if state_bytes is None:
            return RankMemoryAfter()
        return RankMemoryAfter(state_bytes, memory_in_use(context.device))

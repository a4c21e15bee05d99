"""One batch, as one pipeline rank runs it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.comm.joining.store import ValueBoard
from shardwright.run.context import Context
from shardwright.runtime.batch_schedules import (
    BatchSchedules,
    check_one_order,
    homes_of_buffers,
    merged_edges,
)
from shardwright.torch.batch.batch import Batch
from shardwright.torch.execution.loss_weights import LossWeights
from shardwright.torch.execution.trained_model import TrainedModel
from shardwright.torch.program.program import Program
from shardwright.torch.tracing.together import GlueBuffers


def number_of_parts(context: Context, model: TrainedModel, batch: Batch, wanted: int) -> int:
    """Into how many microbatches a batch is cut, where it is smaller than the first: the last of a loader.

    Fewer than wanted change nothing where each counts by its samples. Replicas may work together in each
    microbatch, so that they need equally many.
    """
    if batch.in_one:
        return 1
    samples = batch.num_samples
    if not samples or context.mesh.data > 1 or not model.average_grads_across_microbatches:
        return wanted
    return min(wanted, samples)


class BatchKind:
    """What all batches have in common whose microbatches are run by the same programs: worked out once.

    Attributes:
        programs: as given.
        distinct: each once.
        trains: one of them has a backward.
        schedule: lowered actions of all ranks.
        edges: transfers between stages, with bytes.
        state: changed buffers of the model -> rank that has them.
        draws, python_draws: random numbers are drawn; Python's are.
        ends: one reads values midway.
        changes_batch: arguments are changed in place.
        has_attributes: attributes that are read between units change in a step.
        as_planned: all go through the ranks as the plan says.
    """

    def __init__(self, programs: Sequence[Program], schedules: BatchSchedules):
        check_one_order(programs)
        self.programs = tuple(programs)
        self.distinct = tuple({id(program): program for program in programs}.values())
        traces = [program.trace for program in self.distinct]
        self.trains = any(trace.backward_at is not None for trace in traces)
        self.schedule = schedules.of_batch(programs, trains=self.trains)
        self.edges = merged_edges(self.distinct)
        self.state = homes_of_buffers(self.distinct)
        self.draws = any(program.draws for program in self.distinct)
        self.python_draws = any(trace.random.python_at for trace in traces)
        self.ends = any(trace.ends for trace in traces)
        self.changes_batch = any(trace.effects.changes_batch for trace in traces)
        self.has_attributes = any(trace.effects.attributes for trace in traces)
        self.as_planned = all(program.as_planned for program in self.distinct)
        self.flops = sum(program.flops for program in programs)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankBatch:
    """One batch, as one pipeline rank runs it.

    Attributes:
        rank: the pipeline rank.
        common: what is known of their programs.
        function: the step function.
        parts: the microbatches.
        board: where ranks put up values that a `ReadingStep` reads.
        losses: how much the loss of each microbatch counts.
        buffers: those of the model that the step function changes between modules; None without any.
        watch_memory: look after each action how much is in use.
    """

    rank: int
    common: BatchKind
    function: Callable[..., Any]
    parts: Sequence[Batch]
    board: ValueBoard
    losses: LossWeights
    buffers: GlueBuffers | None
    watch_memory: bool

    @property
    def programs(self) -> Sequence[Program]:
        """Of each microbatch."""
        return self.common.programs
